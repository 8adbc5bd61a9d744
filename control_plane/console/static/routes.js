// Shows the share of each target while weights are typed; a withdrawn target gets none.
for (const form of document.querySelectorAll("[data-route]")) {
  const show = () => {
    const rows = [...form.querySelectorAll("[data-target]")].map((row) => {
      const chosen = row.querySelector("select").selectedOptions[0], isUsed = chosen.value && !("withdrawn" in chosen.dataset);
      return { row, weight: isUsed ? Number(row.querySelector("input").value) || 0 : 0, isUsed };
    });
    const total = rows.reduce((sum, { weight }) => sum + weight, 0);
    for (const { row, weight, isUsed } of rows) row.querySelector("[data-share]").textContent = isUsed && total ? `${Number(((100 * weight) / total).toFixed(1))} %` : "";
  };
  form.addEventListener("input", show);
  show();
}
