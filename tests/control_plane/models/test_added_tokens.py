"""A base model with added tokens: one id each for every reader, old answers as before, trained by `full`, and a base like any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

import gguf  # noqa: E402
import sqlalchemy as sa  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from control_plane.jobs import service as jobs  # noqa: E402
from control_plane.jobs.submission import JobRequest  # noqa: E402
from control_plane.models import added_tokens, base_updates, catalogue  # noqa: E402
from control_plane.models import service as served_models  # noqa: E402
from control_plane.models.added_tokens import RECORD, NewToken, extend  # noqa: E402
from control_plane.models.catalogue import Given, add_local  # noqa: E402
from control_plane.models.operator_catalogue import edited  # noqa: E402
from control_plane.platform.context import Platform  # noqa: E402
from control_plane.platform.settings import Settings, load  # noqa: E402
from control_plane.tenants.rules import Tenant  # noqa: E402
from control_plane.tenants.tables import tenants  # noqa: E402
from core.base_models import catalogue_file  # noqa: E402
from core.errors import Conflict, FtError, InvalidRequest, NotFound, Unavailable  # noqa: E402
from engine.adapters import whole_model  # noqa: E402
from engine.adapters.exports import ExportPrecision, gguf_file, merge  # noqa: E402
from engine.data.schema import Example, Message  # noqa: E402
from engine.data.tokens.chat_tokenizer import ChatTokenizer  # noqa: E402
from engine.training.runtime.model import decoder  # noqa: E402
from engine.training.spec import RunFile  # noqa: E402
from ft_assets.datasets import step  # noqa: E402
from tests.control_plane.models.test_base_updates import variant  # noqa: E402
from tests.engine.adapters.test_exports import with_merges  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.support.models.families import build_family  # noqa: E402
from tests.support.models.tiny_model import CHAT_TEMPLATE, build_tiny_model  # noqa: E402
from tests.support.processes.ft_command import run_ft  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")  # of the libraries
BASE, ID = "acme/base", "acme/base-with-tools"
TOKENS = (NewToken(content="<tool>"), NewToken(content="</tool>"), NewToken(content="<|call|>", special=True))
TEXTS = ("Hello, world! 12345", "Zwölf Boxkämpfer", "", "a<tool", "<|im_start|>user\nhi<|im_end|>")


def sharded(directory: Path) -> Path:
    build_tiny_model(directory)
    decoder.load(directory).save_pretrained(directory, max_shard_size="100KB")
    (directory / "model.safetensors").unlink(missing_ok=True)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


MODELS: dict[str, Callable[[Path], Path]] = {
    "untied": build_tiny_model,
    "tied": lambda directory: build_family("qwen-3", directory),
    "nested": lambda directory: build_family("gemma-3", directory),
    "padded": with_merges,
    "sentencepiece": lambda directory: with_merges(directory, sentencepiece=True),
    "sharded": sharded,
}


@dataclass(frozen=True, kw_only=True)
class Home:
    settings: Settings
    base: Path

    def extend(
        self, directory: Path, *, model_id: str = ID, tokens: Sequence[NewToken] = TOKENS, base: str = BASE
    ) -> added_tokens.Extended:
        return extend(self.settings, model_id, base=base, tokens=tokens, directory=directory)


def home(tmp_path: Path, base: Path) -> Home:
    settings = load({"FT_HOME": str(tmp_path / "home")})
    add_local(settings, BASE, base, Given(license="MIT", context_length=256))
    return Home(settings=settings, base=base)


@pytest.fixture
def tiny(tmp_path: Path) -> Home:
    return home(tmp_path, build_tiny_model(tmp_path / "base"))


def ids_of(directory: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", MODELS)
def test_old_texts_have_the_same_ids_and_logits_and_new_tokens_one_id_each(tmp_path: Path, kind: str) -> None:
    held = home(tmp_path, MODELS[kind](tmp_path / "base"))
    made = held.extend(tmp_path / "new")
    new = tmp_path / "new"
    first = max(Tokenizer.from_file(str(held.base / "tokenizer.json")).get_vocab().values()) + 1
    assert list(made.token_ids.items()) == [("<tool>", first), ("</tool>", first + 1), ("<|call|>", first + 2)]
    assert all(ids_of(new, text) == ids_of(held.base, text) for text in TEXTS)
    assert ids_of(new, "a<tool>b").count(first) == 1

    before, after = decoder.load(held.base), decoder.load(new)
    rows = before.get_input_embeddings().num_embeddings
    assert after.get_input_embeddings().num_embeddings >= first + 3
    assert (after.get_input_embeddings().num_embeddings == rows) == (kind in ("padded", "sentencepiece"))
    prompt = torch.tensor([ids_of(new, "Hello, world! The quick brown fox <|im_end|>")])
    with torch.no_grad():
        old, now = (model.eval()(input_ids=prompt, use_cache=False).logits for model in (before, after))
        marked = after(input_ids=torch.tensor([list(made.token_ids.values())]), use_cache=False).logits
    assert torch.equal(now[..., :first], old[..., :first])
    assert torch.isfinite(marked).all()
    mean = before.get_input_embeddings().weight[:first].double().mean(dim=0)
    torch.testing.assert_close(after.get_input_embeddings().weight[first].double(), mean, atol=1e-7, rtol=0)


@pytest.mark.parametrize("legacy", [False, True], ids=["tokenizer.json alone", "files of older versions beside it"])
@pytest.mark.parametrize(
    ("kind", "tokenizer_class"),
    [("padded", "PreTrainedTokenizerFast"), ("padded", "Qwen2Tokenizer"), ("sentencepiece", "PreTrainedTokenizerFast")],
)
def test_transformers_our_encoders_and_gguf_agree(tmp_path: Path, kind: str, tokenizer_class: str, legacy: bool) -> None:
    base = MODELS[kind](tmp_path / "base")
    spec = json.loads((base / "tokenizer.json").read_text())
    config = json.loads((base / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    if legacy:
        config["added_tokens_decoder"] = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in spec["added_tokens"]}
        (base / "added_tokens.json").write_text(json.dumps({t["content"]: t["id"] for t in spec["added_tokens"]}))
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    made, new = home(tmp_path, base).extend(tmp_path / "new"), tmp_path / "new"

    theirs = AutoTokenizer.from_pretrained(new)
    text = "call <tool>Hello</tool> now<|call|>"
    assert theirs.encode(text, add_special_tokens=False) == ids_of(new, text)
    assert {token: theirs.convert_tokens_to_ids(token) for token in made.token_ids} == made.token_ids
    assert theirs.decode(ids_of(new, "<tool><|call|>"), skip_special_tokens=True) == "<tool>"

    gguf_file.write_gguf(new, tmp_path / "model.gguf", name="tiny", precision=ExportPrecision.F16)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    kinds = {bytes(tokens.parts[tokens.data[i]]).decode(): (i, int(types.parts[types.data[i]][0])) for i in made.token_ids.values()}
    user, control = int(gguf.TokenType.USER_DEFINED), int(gguf.TokenType.CONTROL)
    assert kinds == dict(zip(made.token_ids, zip(made.token_ids.values(), (user, user, control), strict=True), strict=True))


def chat(question: str, answer: str) -> Example:
    return Example(kind="chat", messages=(Message(role="user", content=question), Message(role="assistant", content=answer)))


def test_rows_hold_new_tokens_as_trained_text_and_control_tokens_are_guarded(tmp_path: Path) -> None:
    held = home(tmp_path, with_merges(tmp_path / "base"))
    made = held.extend(tmp_path / "new")
    before, after = ChatTokenizer.load(held.base), ChatTokenizer.load(tmp_path / "new")
    plain = chat("Hello, world!", "The quick brown fox")
    assert after.encode(plain, max_seq_len=999).input_ids.tolist() == before.encode(plain, max_seq_len=999).input_ids.tolist()
    encoded = after.encode(chat("hi", "<tool>fox</tool>"), max_seq_len=999)
    new = list(made.token_ids.values())
    assert [i for i in encoded.input_ids.tolist() if i in new] == new[:2] == [i for i in encoded.labels.tolist() if i in new]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new").apply_chat_template(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<tool>fox</tool>"}], tokenize=True, return_dict=False
    )
    assert encoded.input_ids.tolist() == theirs
    problem = after.control_token_problem(chat("hi", "now<|call|>"))
    assert problem is not None and "<|call|>" in problem.message
    assert before.control_token_problem(chat("hi", "now<|call|>")) is None
    escaped = after.encode(chat("hi", "now<|call|>"), max_seq_len=999, escape_control_tokens=True)
    assert new[2] not in escaped.input_ids.tolist()


@pytest.mark.parametrize("kind", ["untied", "tied", "padded"])
def test_training_all_parameters_changes_each_new_row_and_gives_a_whole_model(tmp_path: Path, kind: str) -> None:
    held = home(tmp_path, MODELS[kind](tmp_path / "base"))
    made, new = held.extend(tmp_path / "new"), tmp_path / "new"
    ids = list(made.token_ids.values())
    rows = json.loads((new / "config.json").read_text())["vocab_size"]
    spec = replace(SPEC, adapter="full", lora=None, optimization=replace(SPEC.optimization, num_epochs=1, max_steps=2, learning_rate=1e-3))
    pack = write_pack(tmp_path / "pack", ids=[*range(40), *ids])
    run = RunFile(spec=spec, attempt=1, base_model_dir=new, pack_dir=pack, work_dir=tmp_path / "work")
    assert Training(run_file=run, vocab_size=rows).attempt()
    final = tmp_path / "work" / "final"
    assert whole_model.verify_whole_model(final, base_dir=new) == []
    merge.merge(new, final, tmp_path / "export")
    assert ids_of(tmp_path / "export", "<tool></tool><|call|>") == ids
    before, after = decoder.load(new), decoder.load(tmp_path / "export")
    for table in ("get_input_embeddings", "get_output_embeddings"):
        old, trained = (getattr(model, table)().weight[ids] for model in (before, after))
        assert torch.equal(old[0], old[1]), "the rows begin alike"
        assert not torch.isclose(old, trained, atol=1e-6).all(dim=1).any()
        assert not torch.equal(trained[0], trained[1]), "training tells them apart"


@pytest.fixture
def operated(platform: Platform, tmp_path: Path) -> Platform:
    """A platform over an empty operator's catalogue of its own."""
    settings = replace(platform.settings, home=tmp_path / "home")
    return replace(platform, settings=settings, models=catalogue.catalogue_of(settings))


def test_a_job_with_all_parameters_on_the_extended_base_is_admitted_and_packed(
    operated: Platform, tenant: Tenant, training_file: str, tmp_path: Path
) -> None:
    add_local(operated.settings, BASE, build_tiny_model(tmp_path / "base"), Given(license="MIT", context_length=256))
    made = extend(operated.settings, ID, base=BASE, tokens=TOKENS, directory=tmp_path / "new")
    assert catalogue.verify(operated.settings, ID) == made.model
    assert (made.model.license, made.model.context_length, made.model.directory) == ("MIT", 256, tmp_path / "new")
    with operated.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant.id).values(tier="premium"))
    request = JobRequest.from_body({"model": ID, "training_file": training_file, "adapter": "full"})
    job_id = str(jobs.submit(operated, tenant.id, request).job.id)
    step.pin_dataset(operated, tenant.id, job_id)
    step.pack(operated, tenant.id, job_id)
    assert jobs.get(operated, tenant.id, job_id).job.state == "queued"


def test_a_job_with_an_adapter_on_the_extended_base_is_told_what_it_does_not_train(
    operated: Platform, tenant: Tenant, training_file: str, tmp_path: Path
) -> None:
    add_local(operated.settings, BASE, build_tiny_model(tmp_path / "base"), Given(context_length=256))
    extend(operated.settings, ID, base=BASE, tokens=TOKENS, directory=tmp_path / "new")
    warned = {}
    for model in (BASE, ID):
        job_id = str(jobs.submit(operated, tenant.id, JobRequest.from_body({"model": model, "training_file": training_file})).job.id)
        step.pin_dataset(operated, tenant.id, job_id)
        step.pack(operated, tenant.id, job_id)
        events, _ = jobs.events_since(operated, tenant.id, job_id, 0)
        warned[model] = [e.message for e in events if e.code == "added_tokens_not_trained"]
    assert warned[BASE] == []
    (message,) = warned[ID]
    assert all(token.content in message for token in TOKENS)
    assert "adapter full" in message
    assert served_models.get(operated, tenant.id, ID).added_tokens == tuple(token.content for token in TOKENS)
    assert served_models.get(operated, tenant.id, BASE).added_tokens == ()


def test_the_catalogue_keeps_what_a_model_was_made_from_until_other_bytes_replace_it(operated: Platform, tmp_path: Path) -> None:
    base = add_local(operated.settings, BASE, build_tiny_model(tmp_path / "base"), Given())
    extend(operated.settings, ID, base=BASE, tokens=TOKENS[:1], directory=tmp_path / "new")
    wanted = {"id": BASE, "digest": base.digest, "tokens": [{"content": "<tool>", "special": False}]}
    assert operated.models.entry(ID)[0]["extended_from"] == wanted
    assert json.loads((tmp_path / "new" / RECORD).read_text()) == wanted
    base_updates.stage_local(operated, ID, variant(tmp_path / "other", tmp_path / "new"))
    base_updates.apply(operated, ID)
    entry = operated.models.entry(ID)[0]
    assert "extended_from" not in entry
    assert entry["previous"][0]["extended_from"] == wanted


def tree(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def test_an_extended_model_can_be_extended_again(tiny: Home, tmp_path: Path) -> None:
    first = tiny.extend(tmp_path / "one")
    second = tiny.extend(tmp_path / "two", model_id="acme/more", base=ID, tokens=[NewToken(content="<more>")])
    assert second.token_ids == {"<more>": 263}
    assert second.base_digest == first.model.digest
    assert ids_of(tmp_path / "two", "<tool><more>") == [260, 263]


REFUSED: dict[str, tuple[str, str]] = {
    "": ("is empty", "white space"),
    " <x>": ("begins or ends with white space", "between"),
    "<twice>": ("was given twice", "once"),
    "a": ("in the vocabulary already, with id 64", "another text"),
    "<|im_end|>": ("in the vocabulary already, with id 259", "another text"),
    "<|im_end|>x": (r"would hide the control token '<\|im_end\|>'", "another text"),
    "x<": (r"would hide the control token '<", "another text"),
    "x<|im_s": (r"would hide the control token '<\|im_start\|>'", "another text"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_token_that_would_not_be_one_of_its_own_is_refused(tiny: Home, tmp_path: Path, text: str) -> None:
    says, next_step = REFUSED[text]
    with pytest.raises(InvalidRequest, match=f"{says}.*{next_step}") as refused:
        tiny.extend(tmp_path / "new", tokens=[NewToken(content="<twice>"), NewToken(content=text)])
    assert (refused.value.code, refused.value.param) == ("invalid_token_text", "token")
    assert not (tmp_path / "new").exists()


def test_a_token_that_the_template_writes_is_a_control_token_and_cannot_be_hidden(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n</think>'")
    assert template != CHAT_TEMPLATE
    held = home(tmp_path, build_tiny_model(tmp_path / "base", template=template))
    held.extend(tmp_path / "one", tokens=[NewToken(content="</think>")])
    tokenizer = ChatTokenizer.load(tmp_path / "one")
    assert tokenizer.render_turns([{"role": "user", "content": "hi"}])[-1] == 260
    assert "</think>" in tokenizer.control_tokens
    with pytest.raises(InvalidRequest, match="would hide the control token '</think>'"):
        held.extend(tmp_path / "two", model_id="acme/two", base=ID, tokens=[NewToken(content="x</think>")])


def test_a_text_that_is_one_token_in_another_spelling_is_refused(tiny: Home, tmp_path: Path) -> None:
    """Byte-level vocabularies have a character for each byte."""
    words = Tokenizer(models.BPE(vocab={"\u00c3": 0, "\u00b6": 1, "\u00c3\u00b6": 2}, merges=[("\u00c3", "\u00b6")]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.save(str(tiny.base / "tokenizer.json"))
    add_local(tiny.settings, "acme/words", tiny.base, Given())
    with pytest.raises(InvalidRequest, match="token '\u00f6' is in the vocabulary already, with id 2"):
        tiny.extend(tmp_path / "new", base="acme/words", tokens=[NewToken(content="\u00f6")])


def test_a_tokenizer_with_gaps_is_refused(tiny: Home, tmp_path: Path) -> None:
    body = json.loads((tiny.base / "tokenizer.json").read_text())
    body["model"]["vocab"]["gap"] = 300
    (tiny.base / "tokenizer.json").write_text(json.dumps(body))
    add_local(tiny.settings, "acme/gaps", tiny.base, Given())
    with pytest.raises(InvalidRequest, match="gaps between its ids") as refused:
        tiny.extend(tmp_path / "new", base="acme/gaps")
    assert refused.value.code == "model_not_extendable"


def refusal(call: Callable[[], Any], kind: type[FtError]) -> FtError:
    with pytest.raises(kind) as refused:
        call()
    return refused.value


def test_what_stands_in_the_way_is_named(tiny: Home, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert refusal(lambda: tiny.extend(new, tokens=[]), InvalidRequest).code == "invalid_token_text"
    assert refusal(lambda: tiny.extend(new, base="acme/none"), NotFound).code == "model_not_found"
    assert refusal(lambda: tiny.extend(new, base="microsoft/phi-4"), NotFound).code == "model_not_pinned"
    assert refusal(lambda: tiny.extend(new, model_id="a b"), InvalidRequest).code == "invalid_id"
    assert refusal(lambda: tiny.extend(new, model_id=BASE), Conflict).code == "model_exists"
    assert refusal(lambda: tiny.extend(tiny.base), InvalidRequest).code == "directory_not_empty"
    assert "cannot be made" in refusal(lambda: tiny.extend(tiny.base / "config.json" / "x"), InvalidRequest).message
    assert not new.exists()
    tiny.extend(new)
    with_others = refusal(lambda: tiny.extend(new, model_id="acme/c", tokens=TOKENS[:1]), InvalidRequest)
    assert (with_others.code, with_others.param) == ("directory_not_empty", "path")


def test_a_base_whose_files_changed_or_are_gone_is_refused(tiny: Home, tmp_path: Path) -> None:
    file = tiny.base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    changed = refusal(lambda: tiny.extend(tmp_path / "new"), FtError)
    assert changed.code == "base_model_changed"
    shutil.rmtree(tiny.base)
    assert "no config.json" in refusal(lambda: tiny.extend(tmp_path / "new"), Unavailable).message
    assert not (tmp_path / "new").exists()


def test_too_little_disk_is_said_before_and_while_files_are_written(tiny: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> FtError:
        error = refusal(lambda: tiny.extend(tmp_path / "new"), Unavailable)
        assert not any("new" in path.name for path in tmp_path.iterdir())
        return error

    with monkeypatch.context() as patch:
        full = shutil.disk_usage(tmp_path)._replace(free=1000)
        patch.setattr(shutil, "disk_usage", lambda path: full)
        assert refused().code == "no_disk_space"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", _no_space)
        assert "GiB" in refused().message
    assert tiny.extend(tmp_path / "new").token_ids


def _no_space(source: Path, target: Path) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("left", ["a part", "everything", "everything but the entry"])
def test_an_interrupted_call_is_completed_by_the_same_call(tiny: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    whole = tiny.extend(tmp_path / "whole", model_id="acme/whole")
    partial, new = tmp_path / ".new.partial", tmp_path / "new"
    if left == "a part":
        shutil.copytree(tmp_path / "whole", partial)
        (partial / "model.safetensors").write_bytes(b"torn")
        (partial / "model-00009.safetensors").write_bytes(b"of another call")
    elif left == "everything":
        tiny.extend(new)
    else:
        tiny.extend(new)
        with edited(catalogue_file(tiny.settings.models_dir)) as entries:
            del entries[ID]
    made = tiny.extend(new)
    assert made.model.digest == whole.model.digest
    assert tree(new) == tree(tmp_path / "whole")
    assert not partial.exists()
    assert catalogue.verify(tiny.settings, ID).digest == made.model.digest


def test_the_command_shows_the_ids_of_the_tokens_and_the_model_its_base(tiny: Home, tmp_path: Path) -> None:
    env = {"FT_HOME": str(tiny.settings.home), "PATH": "/usr/bin", "XDG_CONFIG_HOME": str(tmp_path)}
    options = ("--base", BASE, "--token", "<tool>", "--special-token", "<|call|>", "--path", "new", "--json")
    done = run_ft("admin", "models", "extend", ID, *options, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["token_ids"] == {"<tool>": 260, "<|call|>": 261}
    assert (shown["id"], shown["base"], shown["directory"]) == (ID, BASE, str(tmp_path / "new"))
    listed = json.loads(run_ft("admin", "models", "show", ID, "--json", env=env, cwd=tmp_path).stdout)
    assert listed["extended_from"]["tokens"] == [{"content": "<tool>", "special": False}, {"content": "<|call|>", "special": True}]
    refused = run_ft("admin", "models", "extend", "acme/c", "--base", BASE, "--path", "c", env=env, cwd=tmp_path)
    assert (refused.returncode, "--special-token" in refused.stderr) == (1, True)
