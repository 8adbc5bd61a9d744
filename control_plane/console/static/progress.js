// Words for how far a validation is.
export function amount({ rows, bytes, total_bytes: total }) {
  const share = total ? `${Math.floor((100 * bytes) / total)} %` : "";
  return [rows ? `${rows.toLocaleString()} rows` : "", share].filter(Boolean).join(", ");
}
