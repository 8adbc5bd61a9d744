"""Training on several datasets: each step reads its share of each, knows the loss of each exactly, and a kill changes nothing."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.data_order import DataOrder  # noqa: E402
from engine.training.pack_stream import ARRIVING  # noqa: E402
from engine.training.runtime import pack_loader  # noqa: E402
from engine.training.runtime.run_errors import BadExample, BadSpec  # noqa: E402
from engine.training.spec import RunFile, Source  # noqa: E402
from tests.engine.training.attempts import SPEC, VOCAB, Job, job, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.support.models.deterministic_torch import deterministic_only_here  # noqa: E402, F401
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; a run silences them too

SIZES, PER_EPOCH = (12, 5), (10, 8)
"""Windows of each pack, and how many of them an epoch reads: a part of the first, some of the second again."""
SOURCES = tuple(
    Source(dataset_id=f"ds_{name}", pack_fingerprint=f"pk_{name}", rows_per_epoch=rows)
    for name, rows in zip(("large", "small"), PER_EPOCH, strict=True)
)
MIXED = replace(SPEC, dataset_id="ds_large", pack_fingerprint="pk_large", sources=SOURCES)


def write_packs(directory: Path, *, shards: int = 1) -> Path:
    for number, (source, size) in enumerate(zip(SOURCES, SIZES, strict=True)):
        write_pack(
            directory / source.pack_fingerprint, num_windows=size, seed=number, shards=shards, fingerprint=source.pack_fingerprint,
            validation=2,
        )  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("files")
    return build_tiny_model(root / "base"), write_packs(root / "packs")


def labelled(pack: pack_loader.Pack, row: int) -> int:
    """Tokens of a window that carry loss."""
    shard, number = pack.train.find(row)
    window = pack.train.read(shard).slice(number, 1).to_pylist()[0]
    starts = {sum(window["seq_lengths"][:n]) for n in range(len(window["seq_lengths"]))}
    return sum(label != -100 and place not in starts for place, label in enumerate(window["labels"]))


def test_each_step_knows_the_loss_of_each_source(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, packs = files
    spec = replace(MIXED, optimization=replace(SPEC.optimization, num_epochs=1.5))
    run = Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=packs, work_dir=tmp_path / "work"))
    assert run.attempt()
    pack = pack_loader.load(packs, spec, vocab_size=VOCAB)
    order = DataOrder.of(spec, *pack.train.rows_of_packs)
    steps = [line for line in run.lines() if "loss" in line]
    assert len(steps) == spec.optimization.total_steps(num_rows=sum(PER_EPOCH), world_size=1) == 7
    for step in steps:
        expected = Counter[str]()
        for row in order.step(step["step"] - 1).tolist():
            expected[SOURCES[pack.train.pack_of(row)].dataset_id] += labelled(pack, row)
        counts = {id_: step[f"num_trained_tokens/{id_}"] for id_ in expected}
        assert counts == expected
        mean = sum(step[f"loss/{id_}"] * count for id_, count in counts.items()) / sum(counts.values())
        assert mean == pytest.approx(step["loss"], rel=1e-6)
        assert len(counts) == 2 and step["loss/ds_large"] != step["loss/ds_small"]
    validations = [line for line in run.lines() if "eval_loss" in line]
    assert validations and all(line["eval_loss/ds_large"] != line["eval_loss/ds_small"] for line in validations)
    counts = [json.loads((packs / s.pack_fingerprint / "manifest.json").read_text())["num_tokens"] for s in SOURCES]
    weights = [rows * count / size for rows, count, size in zip(PER_EPOCH, counts, SIZES, strict=True)]
    for line in validations:
        losses = [line[f"eval_loss/{s.dataset_id}"] for s in SOURCES]
        assert line["eval_loss"] == pytest.approx(sum(loss * w for loss, w in zip(losses, weights, strict=True)) / sum(weights), rel=1e-6)
    assert steps[-1]["epoch"] == pytest.approx(7 * 4 / sum(PER_EPOCH), abs=1e-6)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([300], [100]),
        ([7], [7]),
        ([0, 300], [0, 100]),
        ([300, 2, 300], [49, 2, 49]),
        ([40, 30], [40, 30]),
        ([400] * 16, [6] * 12 + [7] * 4),
    ],
)
def test_windows_that_small_validation_parts_leave_go_to_large_ones(sizes: list[int], expected: list[int]) -> None:
    assert sorted(pack_loader.shared(sizes, 100)) == sorted(expected)
    assert all(found <= size and (found or not size) for found, size in zip(pack_loader.shared(sizes, 100), sizes, strict=True))


def test_a_validation_file_is_measured_alone_and_belongs_to_no_source(tmp_path: Path) -> None:
    base, packs = build_tiny_model(tmp_path / "base"), write_packs(tmp_path / "packs")
    manifest = packs / "pk_large" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "settings": {"validation_dataset_id": "ds_held"}}))
    pack = pack_loader.load(packs, MIXED, vocab_size=VOCAB)
    assert pack.validation is not None
    assert (pack.validation.num_rows, pack.validation_rows) == (2, ()), "the rows that the small file's own split assigns are left out"
    spec = replace(MIXED, optimization=replace(SPEC.optimization, num_epochs=0.5))
    run = Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=packs, work_dir=tmp_path / "work"))
    assert run.attempt()
    validations = [line for line in run.lines() if "eval_loss" in line]
    assert validations and not any(name.startswith("eval_loss/") for line in validations for name in line)


def test_a_mixture_of_one_pack_read_once_is_trained_as_the_pack_alone_but_for_the_order(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Loss and weights of a step depend on its rows alone: with one step per epoch, sources change nothing."""
    base, packs = files
    opt = replace(SPEC.optimization, num_epochs=2, per_device_batch_size=1, accumulation_steps=12)
    assert MIXED.lora is not None
    whole = replace(MIXED, sources=(replace(SOURCES[0], rows_per_epoch=12),), optimization=opt, lora=replace(MIXED.lora, dropout=0.0))
    alone = replace(whole, sources=())
    runs = []
    for name, spec, directory in (("mixed", whole, packs), ("alone", alone, packs / "pk_large")):
        run = Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=directory, work_dir=tmp_path / name))
        assert run.attempt()
        runs.append([line["loss"] for line in run.lines() if "loss" in line])
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


def test_the_self_test_compares_examples_of_each_source(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The first pack has windows of one example only, so that boundaries are those of the second one's first window."""
    base, packs = files[0], write_packs(tmp_path / "packs")
    write_pack(packs / "pk_large", num_windows=SIZES[0], examples=1, fingerprint="pk_large")
    spec = replace(MIXED, optimization=replace(SPEC.optimization, num_epochs=0.25))
    run = Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=packs, work_dir=tmp_path / "work"))
    assert run.attempt()
    assert run.details[-1]["self_test"]["boundaries"] > 0


def test_a_mixture_stopped_between_two_steps_goes_on_as_if_it_had_not(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, packs = files
    runs = []
    for name in ("reference", "stopped"):
        run = Training(run_file=RunFile(spec=MIXED, attempt=1, base_model_dir=base, pack_dir=packs, work_dir=tmp_path / name))
        if name == "stopped":
            assert not run.attempt(stop_at_poll=30)
        assert run.attempt()
        runs.append((run.trajectory(), run.final()))
    assert runs[0] == runs[1]


def mixed_job(made: Job, *, shards: int = 1) -> Job:
    made.pack = write_packs(made.root / "packs", shards=shards)
    return made


@pytest.mark.slow
def test_a_killed_mixture_resumes_bit_identically_from_its_checkpoint(tmp_path: Path) -> None:
    changes = {"sources": SOURCES, "dataset_id": "ds_large", "pack_fingerprint": "pk_large"}
    with job(tmp_path / "whole", **changes) as whole, job(tmp_path / "killed", **changes) as killed:
        assert mixed_job(whole).train() == 0, whole.log()
        process = mixed_job(killed).start()
        killed.wait_until(lambda: len(killed.steps()) >= 5)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        assert killed.train() == 0, killed.log()
        assert "resuming from" in killed.log()
        names = ("adapter_config.json", "adapter_model.safetensors")
        assert [(killed.work / "final" / n).read_bytes() for n in names] == [(whole.work / "final" / n).read_bytes() for n in names]
        measured = ("step", "loss", "loss/ds_large", "loss/ds_small", "num_trained_tokens/ds_large")
        assert [[m[k] for k in measured] for m in killed.steps()] == [[m[k] for k in measured] for m in whole.steps()]


@pytest.mark.slow
def test_two_ranks_have_the_losses_by_source_of_one(tmp_path: Path) -> None:
    changes = {"sources": SOURCES, "dataset_id": "ds_large", "pack_fingerprint": "pk_large"}
    halved = {"strategy": "fsdp2", "world_size": 2, "optimization": replace(SPEC.optimization, accumulation_steps=1)}
    with job(tmp_path / "single", **changes) as single, job(tmp_path / "pair", **changes, **halved) as pair:
        assert mixed_job(single).train() == 0, single.log()
        assert [p.wait(timeout=300) for p in mixed_job(pair).start_ranks()] == [0, 0], pair.log()
        for name in ("loss", "loss/ds_large", "loss/ds_small"):
            assert [m[name] for m in pair.steps()] == pytest.approx([m[name] for m in single.steps()], abs=1e-4)
        assert [m["num_trained_tokens/ds_small"] for m in pair.steps()] == [m["num_trained_tokens/ds_small"] for m in single.steps()]


def test_shards_of_both_packs_are_waited_for(files: tuple[Path, Path], tmp_path: Path) -> None:
    packs = write_packs(tmp_path / "packs", shards=3)
    late = packs / "pk_small" / "shard-00002.parquet"
    late.rename(tmp_path / "late")
    (packs / ARRIVING).touch()
    pack = pack_loader.load(packs, MIXED, vocab_size=VOCAB, waiting=lambda: (tmp_path / "late").rename(late))
    assert pack.train.read(5).num_rows == SIZES[1] - SIZES[1] * 2 // 3
    assert pack.validation_rows == (2, 2)


def test_a_bad_row_is_named_with_its_dataset(files: tuple[Path, Path], tmp_path: Path) -> None:
    packs = write_packs(tmp_path / "packs")
    with pytest.raises(BadExample, match="train window 0 of dataset ds_large is longer than max_seq_len 8"):
        pack_loader.load(packs, replace(MIXED, max_seq_len=8), vocab_size=VOCAB)
    (packs / "pk_other").symlink_to(packs / "pk_small")
    with pytest.raises(BadSpec, match="is pack pk_small, but the spec requires pk_other"):
        pack_loader.load(packs, replace(MIXED, sources=(SOURCES[0], replace(SOURCES[1], pack_fingerprint="pk_other"))), vocab_size=VOCAB)


@pytest.mark.parametrize(("change", "message"), [({"shards": []}, "has no windows"), ({"num_trained_tokens": 0}, "carries loss")])
def test_a_pack_with_nothing_to_train_on_is_named_with_its_dataset(tmp_path: Path, change: dict[str, object], message: str) -> None:
    packs = write_packs(tmp_path / "packs")
    manifest = packs / "pk_small" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(BadExample, match=f"of dataset ds_small .*{message}") as refused:
        pack_loader.load(packs, MIXED, vocab_size=VOCAB)
    assert refused.value.detail["dataset_id"] == "ds_small"
