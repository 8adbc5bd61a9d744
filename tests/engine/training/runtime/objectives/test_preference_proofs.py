"""A reference that is not this model's, and padding that a model sees, are refused before the first step."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

import pyarrow as pa  # noqa: E402
import pyarrow.compute as pc  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from engine.training.runtime.run_errors import BadExample, BadInput, PackingRefused  # noqa: E402
from engine.training.spec import Quantization, RunFile, WarmStart  # noqa: E402
from tests.engine.training.runtime.objectives.preference_runs import METHODS, Site, objective_of, share, stirred  # noqa: E402
from tests.support.models.families import build_family  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries; a run silences them too

WITH_REFERENCE = ("dpo", "kto")
FIRST = {"dpo": "chosen_logp", "kto": "kl_logp"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def rewritten(run: RunFile, root: Path, change: Callable[[pa.Table], pa.Table], *, name: str = "ref-shard-00000.parquet") -> RunFile:
    """`run` with a reference whose file `name` was changed, and whose manifest agrees with it."""
    assert run.reference_dir is not None
    directory = Path(shutil.copytree(run.reference_dir, root / "reference"))
    pq.write_table(change(pq.read_table(directory / name)), directory / name)
    manifest = json.loads((directory / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == name:
            entry["sha256"] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return replace(run, reference_dir=directory)


def column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), table.schema.field(name), values)


@pytest.mark.parametrize("method", WITH_REFERENCE)
def test_a_reference_of_another_model_is_refused_by_its_numbers(site: Site, method: str, tmp_path: Path) -> None:
    run = site.run(method)
    good = objective_of(run)
    assert good.self_test(good.model)["reference"] < 1e-4

    def shifted(table: pa.Table) -> pa.Table:
        return column(table, FIRST[method], pc.cast(pc.multiply(table[FIRST[method]], 1.01), pa.float32()))

    foreign = objective_of(rewritten(run, tmp_path, shifted))
    with pytest.raises(BadInput, match="are not those of the model that training starts from"):
        foreign.self_test(foreign.model)


@pytest.mark.parametrize("method", WITH_REFERENCE)
def test_a_reference_of_other_weights_is_refused_although_its_names_agree(site: Site, method: str) -> None:
    objective = stirred(site.objective(method))
    with pytest.raises(BadInput, match="compute the reference log-probabilities again"):
        objective.self_test(objective.model)


@pytest.mark.parametrize("method", WITH_REFERENCE)
def test_a_reference_of_other_rows_is_refused(site: Site, method: str, tmp_path: Path) -> None:
    def turned(table: pa.Table) -> pa.Table:
        return table.take(list(reversed(range(table.num_rows))))

    with pytest.raises(BadInput, match="do not match the training rows of the pack"):
        objective_of(rewritten(site.run(method), tmp_path / "order", turned))
    with pytest.raises(BadInput, match="do not match the validation rows of the pack"):
        objective_of(rewritten(site.run(method), tmp_path / "part", lambda t: t.slice(1), name="ref-val-00000.parquet"))


def test_numbers_that_are_none_are_refused(site: Site, tmp_path: Path) -> None:
    def broken(table: pa.Table) -> pa.Table:
        return column(table, "rejected_logp", pa.array([float("nan"), *table["rejected_logp"].to_pylist()[1:]], pa.float32()))

    with pytest.raises(BadInput, match=r"rejected_logp of training row \d+ is not a number"):
        objective_of(rewritten(site.run("dpo"), tmp_path, broken))


def test_a_reference_under_another_name_is_refused(site: Site) -> None:
    run = site.run("dpo")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("have key rf_", {"reference": "rf_0"}),
        ("have base model 0000", {"base_digest": "1" * 64}),
        ("have quantization None", {"adapter": "qlora", "quantization": Quantization()}),
        ("have adapter None", {"warm_start": WarmStart(adapter="a", manifest_sha256="2" * 64)}),
        ("the run file names none", {"reference": None}),
    ]
    from engine.training.runtime import pack_loader
    from engine.training.runtime.objectives import reference_reader
    from tests.support.models.tiny_model import VOCAB

    pack = pack_loader.load(run.pack_dir, run.spec, vocab_size=VOCAB)
    rows = pack.train.whole()
    assert reference_reader.load(run, pack, rows)[0].num_rows == pack.train.num_rows
    for words, changes in cases:
        with pytest.raises(BadInput, match=words):
            reference_reader.load(replace(run, spec=replace(run.spec, **changes)), pack, rows)


@pytest.mark.parametrize("method", METHODS)
def test_a_pack_is_read_once(site: Site, method: str) -> None:
    from engine.training.runtime import pack_loader, parallel
    from engine.training.runtime.train import build_objective
    from tests.support.models.tiny_model import VOCAB

    run = site.run(method)
    pack = pack_loader.load(run.pack_dir, run.spec, vocab_size=VOCAB)
    before = pack.train.read.cache_info()
    build_objective(run, pack, parallel.build(run.spec))
    after = pack.train.read.cache_info()
    assert after.hits + after.misses - before.hits - before.misses == len(pack.train.rows)


def test_a_damaged_or_absent_reference_is_refused(site: Site, tmp_path: Path) -> None:
    run = site.run("dpo")
    assert run.reference_dir is not None
    directory = Path(shutil.copytree(run.reference_dir, tmp_path / "damaged"))
    file = directory / "ref-shard-00000.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(BadInput, match="but the manifest says"):
        objective_of(replace(run, reference_dir=directory))
    with pytest.raises(BadInput, match="has no complete reference log-probabilities"):
        objective_of(replace(run, reference_dir=tmp_path / "nothing"))


@pytest.mark.parametrize("method", METHODS)
def test_padding_that_the_model_sees_is_refused(site: Site, method: str) -> None:
    objective = site.objective(method)
    rows = objective._train
    faithful = rows.collate

    def on_the_left(numbers: Sequence[int]) -> dict[str, Any]:
        """Padding before the tokens, and a mask that does not hide it."""
        batch: dict[str, Any] = faithful(numbers)
        for prefix in ("", "KL_") if method == "kto" else ("",):
            lengths = batch[f"{prefix}attention_mask"].sum(dim=1)
            width = batch[f"{prefix}input_ids"].shape[1]
            assert lengths.min() < width, "no padding was seen"
            for name in ("input_ids", "completion_mask"):
                moved = [row.roll(width - int(n)) for row, n in zip(batch[prefix + name], lengths, strict=True)]
                batch[prefix + name] = torch.stack(moved)
            batch[f"{prefix}attention_mask"] = torch.ones_like(batch[f"{prefix}attention_mask"])
        return batch

    assert objective.self_test(objective.model)["padding"] < 1e-5
    rows.collate = on_the_left
    with pytest.raises(PackingRefused, match="padding changes what the model sees"):
        objective.self_test(objective.model)


def test_a_row_whose_loss_is_no_number_is_named(site: Site) -> None:
    objective = site.objective("orpo")
    rows = [set(objective.collate([r])["input_ids"].flatten().tolist()) for r in range(objective._train.num_rows)]
    number, only = next((r, t) for r, own in enumerate(rows) for t in sorted(own) if sum(t in other for other in rows) == 1)
    poisoned = next(m for m in objective.model.modules() if isinstance(m, torch.nn.Embedding))
    with torch.no_grad():
        poisoned.weight[only] = float("nan")
    with pytest.raises(BadExample, match=f"train row {number} alone"):
        objective.blame(objective.model, range(objective._train.num_rows))


@pytest.fixture(scope="module")
def sites_with_experts(tmp_path_factory: pytest.TempPathFactory) -> list[Site]:
    """One whose router has no load-balancing loss, and one whose config gives it the weight 2; otherwise the same."""
    root = tmp_path_factory.mktemp("experts")
    settings: list[dict[str, Any]] = [{"router_aux_loss_coef": 0.0}, {"router_aux_loss_coef": 2.0, "output_router_logits": True}]
    return [
        Site(root / name, count=8, base=build_family("qwen-3-moe", root / name / "base", **changes))
        for name, changes in zip(("unbalanced", "balanced"), settings, strict=True)
    ]


@pytest.mark.parametrize("method", METHODS)
def test_no_method_adds_the_load_balancing_loss_of_a_base_with_experts(sites_with_experts: list[Site], method: str) -> None:
    with torch.no_grad():
        found = [float(share(site.objective(method), [0, 1])) for site in sites_with_experts]
    assert found[1] == pytest.approx(found[0], abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_logits_that_training_scores_in_another_way_are_not_blamed_on_padding(site: Site, method: str) -> None:
    """A scale of logits under a name that the library's fused head does not know."""
    objective = site.objective(method)
    head = objective.model.get_base_model().get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, logits: logits / 4)
    with pytest.raises(PackingRefused, match="padding is not the cause") as refused:
        objective.self_test(objective.model)
    assert refused.value.detail["cause"] == "output_layer"
    hook.remove()
    assert objective.self_test(objective.model)["padding"] < 1e-5
