"""The preference losses equal their papers' formulas and TRL's own, share out exactly over micro-batches, and train."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

import pyarrow.parquet as pq  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.functional import logsigmoid  # noqa: E402

from engine.training import methods  # noqa: E402
from engine.training.reference_logps import ReferenceManifest  # noqa: E402
from tests.engine.training.attempts import SPEC  # noqa: E402
from tests.engine.training.runtime.objectives.preference_runs import METHODS, Site, log_probability, share, shares, stirred  # noqa: E402
from tests.support.models.reference_rows import load_logps  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries; a run silences them too

ROWS = [0, 3, 1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def pack_rows(run: Any, part: str = "shard") -> list[dict[str, Any]]:
    return [row for path in sorted(run.pack_dir.glob(f"{part}-*.parquet")) for row in pq.read_table(path).to_pylist()]


def reference_rows(run: Any, part: str = "shard") -> list[dict[str, Any]]:
    names = [p.name for p in sorted(run.pack_dir.glob(f"{part}-*.parquet"))]
    rows: list[dict[str, Any]] = load_logps(run.reference_dir, ReferenceManifest.read(run.reference_dir), names).to_pylist()
    return rows


def formula(method: str, run: Any, model: Any, rows: list[int]) -> Any:
    """The mean loss of `rows` as the method's paper has it."""
    settings: Mapping[str, Any] = run.spec.method_settings
    pack = pack_rows(run)
    if method == "kto":
        return kto(run, model, [pack[r] for r in rows], [reference_rows(run)[r] for r in rows])
    losses = []
    for r in rows:
        chosen, rejected = (log_probability(model, pack[r][f"{s}_input_ids"], pack[r][f"{s}_labels"]) for s in ("chosen", "rejected"))
        if method == "dpo":
            ref = reference_rows(run)[r]
            margin = (chosen.sum() - ref["chosen_logp"]) - (rejected.sum() - ref["rejected_logp"])
            flipped = settings["label_smoothing"]  # the share of labels that cDPO takes for wrong
            losses.append(-(1 - flipped) * logsigmoid(settings["beta"] * margin) - flipped * logsigmoid(-settings["beta"] * margin))
        elif method == "simpo":
            losses.append(-logsigmoid(settings["beta"] * (chosen.mean() - rejected.mean()) - settings["gamma"]))
        else:
            odds = [p.mean() - torch.log1p(-torch.exp(p.mean())) for p in (chosen, rejected)]
            imitation = -log_probability(model, pack[r]["chosen_input_ids"], pack[r]["chosen_input_ids"]).mean()
            losses.append(imitation - settings["beta"] * logsigmoid(odds[0] - odds[1]))
    return torch.stack(losses).mean()


def kto(run: Any, model: Any, rows: list[dict[str, Any]], references: list[dict[str, Any]]) -> Any:
    settings: Mapping[str, Any] = run.spec.method_settings
    beta = settings["beta"]
    distances = [
        log_probability(model, r["kl_input_ids"], r["kl_labels"]).sum() - f["kl_logp"] for r, f in zip(rows, references, strict=True)
    ]
    kl = torch.stack(distances).mean().clamp(min=0).detach()
    losses = []
    for row, ref in zip(rows, references, strict=True):
        reward = log_probability(model, row["input_ids"], row["labels"]).sum() - ref["logp"]
        weight = settings["desirable_weight" if row["label"] else "undesirable_weight"]
        losses.append(weight * (1 - torch.sigmoid(beta * ((reward - kl) if row["label"] else (kl - reward)))))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_and_its_gradient_are_the_papers(site: Site, method: str) -> None:
    run = site.run(method)
    objective = stirred(site.objective(method))
    objective.model.eval()
    expected = formula(method, run, objective.model, ROWS)
    found = share(objective, ROWS)
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    trained = [p for p in objective.model.parameters() if p.requires_grad]
    for mine, theirs in zip(torch.autograd.grad(found, trained), torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("dpo", {"label_smoothing": 0.3}, id="labels that may be wrong"),
        pytest.param("dpo", {"beta": 0.7, "label_smoothing": 0.1}, id="another beta"),
        pytest.param("kto", {"desirable_weight": 3.0, "undesirable_weight": 0.5}, id="good answers count six times as much"),
        pytest.param("kto", {"beta": 0.7, "desirable_weight": 0.5, "undesirable_weight": 2.0}, id="bad ones four times"),
        pytest.param("orpo", {"beta": 0.7}, id="odds of another weight"),
        pytest.param("simpo", {"beta": 0.7, "gamma": 0.2}, id="another margin"),
    ],
)
def test_each_setting_of_a_method_does_what_its_paper_says(site: Site, method: str, settings: Mapping[str, float]) -> None:
    defaults = site.run(method).spec.method_settings
    assert set(settings) <= set(defaults)
    changed = site.run(method, method_settings={**defaults, **settings})
    objective = stirred(site.objective(method, method_settings={**defaults, **settings}))
    objective.model.eval()
    if method == "kto":
        assert {pack_rows(changed)[r]["label"] for r in ROWS} == {True, False}
    found = share(objective, ROWS).item()
    assert found == pytest.approx(formula(method, changed, objective.model, ROWS).item(), abs=1e-5)
    assert abs(found - formula(method, site.run(method), objective.model, ROWS).item()) > 1e-3, "the defaults give the same loss"


def trl_batch(run: Any, rows: list[int]) -> dict[str, Any]:
    """As the collator of the experimental trainers gives it."""
    pack, batch = pack_rows(run), {}
    for side in ("chosen", "rejected"):
        ids = [torch.tensor(pack[r][f"{side}_input_ids"]) for r in rows]
        labels = [torch.tensor(pack[r][f"{side}_labels"]) for r in rows]
        batch[f"{side}_input_ids"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=0)
        batch[f"{side}_labels"] = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        batch[f"{side}_attention_mask"] = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
    return batch


@pytest.mark.parametrize("method", ["orpo", "simpo"])
def test_the_forward_pass_gives_what_the_librarys_own_gives(site: Site, method: str) -> None:
    run, objective = site.run(method), stirred(site.objective(method))
    objective.model.eval()
    trainer = objective._trainer
    library: Any = next(c for c in type(trainer).__mro__ if c.__module__.startswith("trl.experimental"))
    for rows in ([4], ROWS):
        ours = trainer.concatenated_forward(objective.model, objective.collate(rows))
        theirs = library.concatenated_forward(trainer, objective.model, trl_batch(run, rows))
        for side in (0, 1):
            torch.testing.assert_close(ours[side], theirs[side], atol=1e-5, rtol=1e-5)
        if len(rows) == 1:  # of several pairs it is a mean over pairs here and over tokens there
            torch.testing.assert_close(ours[4], theirs[4], atol=1e-5, rtol=1e-5)


def test_a_batch_of_pairs_is_the_librarys_where_both_score_the_same_tokens(site: Site) -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    run, objective = site.run("dpo"), site.objective("dpo")
    pack, reference = pack_rows(run), reference_rows(run)
    examples = []
    for r in ROWS:
        n = pack[r]["prompt_length"]
        row = {"prompt_ids": pack[r]["chosen_input_ids"][:n]}
        for side in ("chosen", "rejected"):
            scored = [x for x in pack[r][f"{side}_labels"][n:] if x != -100]
            assert scored == pack[r][f"{side}_input_ids"][n : n + len(scored)]
            row |= {f"{side}_ids": pack[r][f"{side}_input_ids"][n:], f"ref_{side}_logps": reference[r][f"{side}_logp"]}
        examples.append(row)
    theirs = DataCollatorForPreference(pad_token_id=objective._trainer.processing_class.pad_token_id)(examples)
    ours = objective.collate(ROWS)
    assert set(ours) == set(theirs)
    for name in set(ours) - {"completion_mask"}:
        assert torch.equal(ours[name], theirs[name]), name
    # TRL scores everything after the prompt; we leave out what the template writes after an answer.
    more = theirs["completion_mask"] - ours["completion_mask"]
    assert more.min() == 0 and more.sum(dim=1).max() <= 1


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_add_up_to_one_batch(site: Site, method: str) -> None:
    objective = stirred(site.objective(method))
    objective.model.eval()
    trained = [p for p in objective.model.parameters() if p.requires_grad]
    whole = torch.autograd.grad(share(objective, [0, 1, 2, 3, 4]), trained)
    metrics = objective.metrics()
    assert method != "kto" or metrics["kl"] > 0.1, "a distance that is held at 0 couples nothing"
    parts = [torch.autograd.grad(loss, trained) for loss in shares(objective, [[0, 1], [2, 3], [4]])]
    for name, value in objective.metrics().items():
        assert value == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
    for one, *several in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(several), one, atol=1e-6, rtol=1e-4)


def test_two_ranks_of_kto_share_one_estimate_and_one_loss(site: Site, tmp_path: Path) -> None:
    objective = stirred(site.objective("kto"))
    objective.model.eval()
    labels = objective.collate(range(objective._train.num_rows))["label"].tolist()
    of_ranks = [[row for row, good in enumerate(labels) if good is side][:count] for side, count in ((True, 3), (False, 2))]
    alone = [share(objective, rows).item() * len(rows) / 5 for rows in of_ranks]
    objective.metrics()
    whole = [loss.item() for loss in shares(objective, of_ranks)]
    kl = objective.metrics()["kl"]
    assert kl > 0.1, "a distance that is held at 0 couples nothing"
    assert min(abs(mine - shared) for mine, shared in zip(alone, whole, strict=True)) > 1e-4, "each rank's own distance gives the same loss"
    context = multiprocessing.get_context("fork")  # what is built here is there at once
    found = context.SimpleQueue()

    def train(rank: int, rows: list[int]) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=rank, world_size=2)
        batch = objective.collate(rows)
        objective.prepare_step(objective.model, [batch])
        loss = objective.loss(objective.model, batch, total_weight=5.0)
        found.put((rank, loss.item(), objective.metrics()["kl"]))
        dist.destroy_process_group()

    ranks = [context.Process(target=train, args=(rank, rows)) for rank, rows in enumerate(of_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    results = sorted(found.get() for _ in ranks)
    assert [k for *_, k in results] == pytest.approx([kl, kl], rel=1e-5)
    assert [loss for _, loss, _ in results] == pytest.approx(whole, abs=1e-6)


def test_the_distance_of_kto_is_estimated_without_dropout_and_without_gradients(site: Site) -> None:
    objective = stirred(site.objective("kto"))
    batch = objective.collate(ROWS)
    with_gradients = list[bool]()

    def distance() -> float:
        with objective.model.register_forward_pre_hook(lambda *_: with_gradients.append(torch.is_grad_enabled())):
            objective.prepare_step(objective.model, [batch])
        objective.loss(objective.model, batch, total_weight=3.0)
        return float(objective.metrics()["kl"])

    objective.model.eval()
    expected = distance()
    assert expected > 0.1, "a distance that is held at 0 shows nothing"
    objective.model.train()
    assert [distance(), distance()] == [expected, expected]
    assert with_gradients == [False] * 3


@pytest.mark.parametrize("method", METHODS)
def test_ten_steps_raise_the_margin_of_chosen_over_rejected(site: Site, method: str) -> None:
    objective = site.objective(method)
    objective.model.train()
    optimizer = torch.optim.AdamW([p for p in objective.model.parameters() if p.requires_grad], lr=5e-3)
    margins, losses = [], []
    for _ in range(10):
        for loss in shares(objective, [[0, 1, 2, 3], [4, 5, 6, 7]]):
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        metrics = objective.metrics()
        assert set(metrics) == set(methods.method_named(method).metrics)
        margins.append(metrics["rewards/margins"])
    assert margins[-1] > margins[0] + 0.05
    assert sum(losses[-2:]) < sum(losses[:2])


@pytest.mark.parametrize("adapter", ["lora", "full", "qlora"])
@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_holding_the_weights_gives_a_loss_and_gradients(site: Site, method: str, adapter: str) -> None:
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
    objective = site.objective(method, adapter=adapter)
    trained = {n: p for n, p in objective.model.named_parameters() if p.requires_grad}
    assert all(("lora" in n) == (adapter != "full") for n in trained)
    assert all(p.dtype == torch.float32 for p in trained.values())
    assert any(type(p).__name__ == "Params4bit" for p in objective.model.parameters()) == (adapter == "qlora")
    assert objective._trainer.__dict__.get("ref_model") is None
    proved = objective.self_test(objective.model)
    assert proved["padding"] < 1e-5 and proved.get("reference", 0.0) < 1e-4
    loss = share(objective, [0, 1])
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    for name, parameter in trained.items():  # lora_A has none while lora_B is 0
        assert "lora_A" in name or (parameter.grad is not None and parameter.grad.abs().sum() > 0), f"{name} has no gradient"


@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_on_in_training_and_off_in_proofs_and_validation(site: Site, method: str) -> None:
    objective = stirred(site.objective(method))
    objective.model.train()
    state = torch.random.get_rng_state()
    before = [objective.validate(objective.model, stop=lambda: False) for _ in range(2)]
    batches = [objective.collate([0, 1]) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), state), "something drew from the random state"
    assert before[0] == before[1] and objective.model.training
    assert set(before[0]) >= {"eval_loss", "eval_rewards/margins"}
    losses = [objective.loss(objective.model, b, total_weight=2.0).item() for b in batches]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("method", METHODS)
def test_validation_is_the_mean_over_its_rows_and_stops_when_asked(site: Site, method: str) -> None:
    objective = stirred(site.objective(method))
    objective.model.eval()
    found = objective.validate(objective.model, stop=lambda: False)
    held_out = objective._validation
    losses = []
    with torch.no_grad():
        for first in range(0, held_out.num_rows, 2):
            rows = range(first, min(first + 2, held_out.num_rows))
            losses += [float(objective._trainer.compute_loss(objective.model, held_out.collate(rows)))] * len(rows)
    assert held_out.num_rows > 2 and found["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    in_threes = stirred(site.objective(method, optimization=replace(SPEC.optimization, per_device_batch_size=3)))
    assert in_threes.validate(in_threes.model, stop=lambda: False) == pytest.approx(found, rel=1e-4, abs=1e-6)
    assert objective.validate(objective.model, stop=lambda: True) == {}
    assert objective.metrics() == {}, "validation left metrics behind that the next step would report"


def test_validation_of_kto_uses_the_distance_of_its_own_rows(site: Site) -> None:
    run, objective = site.run("kto"), stirred(site.objective("kto"))
    objective.model.eval()
    share(objective, ROWS)
    expected = kto(run, objective.model, pack_rows(run, "val"), reference_rows(run, "val")).item()
    found = objective.validate(objective.model, stop=lambda: False)["eval_loss"]
    assert found == pytest.approx(expected, abs=1e-5), "the distance of the last training step was used"
