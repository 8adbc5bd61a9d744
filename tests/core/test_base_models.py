"""An id of the catalogue means pinned bytes, and only safe ones."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
import yaml

from control_plane.models.operator_catalogue import edited
from core import base_models
from core.base_models import BaseModel, Catalogue, file_sha256, model_digest, template_digest, tokenizer_digest
from core.errors import IntegrityError, InvalidRequest, NotFound, Unavailable
from engine.training import model_shapes, recipes
from tests.support.models.tiny_model import CONTEXT, build_tiny_model

TODAY = dt.date(2026, 11, 21)


def catalogue(tmp_path: Path, **entry: object) -> Catalogue:
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"models": [{"id": "tiny", **entry}]}))
    return Catalogue.load([tmp_path / "more.yaml"])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "tiny")


def test_a_local_model_is_known_by_its_files(tmp_path: Path, tiny: Path) -> None:
    model = catalogue(tmp_path, path="tiny", license="MIT").get("tiny")
    assert isinstance(model, BaseModel)
    assert (model.id, model.repo, model.license, model.directory) == ("tiny", "local", "MIT", tiny)
    assert model.context_length == CONTEXT
    assert 100_000 < model.num_parameters < 300_000
    assert model.digest == model_digest(tiny)
    assert model.revision == model.digest[:40]
    assert len({model.digest, model.tokenizer_digest, model.template_digest}) == 3


def test_an_unknown_id_is_not_found_and_the_known_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="demo-llama-3m, tiny") as missing:
        catalogue(tmp_path, path="tiny").get("gpt-17")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_any_changed_file_changes_the_digest(tiny: Path, file: str) -> None:
    before = model_digest(tiny)
    (tiny / file).write_bytes((tiny / file).read_bytes() + b" ")
    os.utime(tiny / file, ns=(1, 1))
    assert model_digest(tiny) != before


def test_the_digest_of_the_tokenizer_leaves_the_template_out_and_the_template_has_its_own(tiny: Path) -> None:
    before = tokenizer_digest(tiny), template_digest(tiny)
    (tiny / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(tiny) == before[0]
    assert template_digest(tiny) != before[1]


def test_a_pinned_digest_that_differs_is_an_integrity_error(tmp_path: Path, tiny: Path) -> None:
    assert catalogue(tmp_path, path="tiny", digest=model_digest(tiny)).get("tiny").digest == model_digest(tiny)
    with pytest.raises(IntegrityError, match="pins 00"):
        catalogue(tmp_path, path="tiny", digest="00").get("tiny")


def test_pickled_weights_and_code_of_their_own_are_refused(tmp_path: Path, tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(InvalidRequest) as code:
        catalogue(tmp_path, path="tiny").get("tiny")
    assert code.value.code == "remote_code"
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match=r"pytorch_model\.bin") as pickled:
        catalogue(tmp_path, path="tiny").get("tiny")
    assert pickled.value.code == "unsafe_weights"


def test_a_model_without_files_must_be_pinned_by_digest(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="digest, tokenizer_digest"):
        catalogue(tmp_path, repo="org/model", revision="abc").get("tiny")
    pins = {name: name[0] * 64 for name in ("digest", "tokenizer_digest", "template_digest")}
    model = catalogue(tmp_path, repo="org/model", revision="abc", context_length=8192, num_parameters=8_000_000_000, **pins).get("tiny")
    assert (model.repo, model.directory, model.digest) == ("org/model", None, "d" * 64)


def test_a_missing_directory_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="nowhere"):
        catalogue(tmp_path, path="nowhere").get("tiny")


def test_a_deprecated_model_is_refused_at_submission_but_still_found(tmp_path: Path, tiny: Path) -> None:
    models = catalogue(tmp_path, path=str(tiny), deprecated_since=TODAY)
    assert models.get("tiny").deprecated_since == TODAY
    assert models.check_submittable("tiny", today=TODAY - dt.timedelta(days=1)).id == "tiny"
    with pytest.raises(InvalidRequest) as refused:
        models.check_submittable("tiny", today=TODAY)
    assert refused.value.code == "model_deprecated"


@pytest.mark.parametrize("body", ["models: 3", "models: [{path: x}]", "models: [{id: a, pth: x}]", "{", "- 1"])
def test_a_catalogue_that_is_not_one_is_refused(tmp_path: Path, body: str) -> None:
    (tmp_path / "bad.yaml").write_text(body)
    with pytest.raises(InvalidRequest) as refused:
        Catalogue.load([tmp_path / "bad.yaml"])
    assert refused.value.code == "invalid_catalogue"


def test_the_built_in_catalogue_has_the_demo_model() -> None:
    assert "demo-llama-3m" in Catalogue.load().ids()


def test_a_changed_file_is_noticed_though_its_size_and_its_time_of_change_are_kept(tmp_path: Path, tiny: Path) -> None:
    models = catalogue(tmp_path, path="tiny", digest=model_digest(tiny))
    models.get("tiny")
    weights = tiny / "model.safetensors"
    stat, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    with weights.open("r+b") as file:
        file.write(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    with pytest.raises(IntegrityError) as changed:
        models.get("tiny")
    assert changed.value.code == "base_model_changed"


def test_a_job_gets_the_bytes_that_it_was_promised_or_none(tmp_path: Path, tiny: Path) -> None:
    models = catalogue(tmp_path, path="tiny")
    promised = models.get("tiny").digest
    assert models.get_pinned("tiny", promised, fresh=True).digest == promised
    (tiny / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(IntegrityError, match="was pinned when it was chosen") as changed:
        models.get_pinned("tiny", promised)
    assert changed.value.code == "base_model_changed"


def test_the_card_of_a_pinned_model_reads_no_file(tmp_path: Path, tiny: Path) -> None:
    whole = catalogue(tmp_path, path="tiny", license="MIT").get("tiny")
    pins = {k: getattr(whole, k) for k in ("digest", "tokenizer_digest", "template_digest", "context_length", "num_parameters")}
    models = catalogue(tmp_path, path="tiny", license="MIT", **pins)
    (tiny / "model.safetensors").unlink()
    assert models.card("tiny") == whole


def test_code_named_by_the_tokenizer_is_refused_too(tmp_path: Path, tiny: Path) -> None:
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    (tiny / "tokenizer_config.json").write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    with pytest.raises(InvalidRequest) as code:
        catalogue(tmp_path, path="tiny").get("tiny")
    assert code.value.code == "remote_code"


def test_the_operators_file_may_change_while_processes_run(tmp_path: Path, tiny: Path) -> None:
    file = tmp_path / "models" / "catalogue.yaml"
    models = Catalogue.load(operator=file)
    assert "acme/tiny-1.0" not in models.ids()
    with edited(file) as entries:
        entries["acme/tiny-1.0"] = {"id": "acme/tiny-1.0", "path": str(tiny)}
    assert models.get("acme/tiny-1.0").directory == tiny
    with edited(file) as entries:
        entries["acme/tiny-1.0"]["deprecated_since"] = TODAY
    with pytest.raises(InvalidRequest, match="deprecated since"):
        models.check_submittable("acme/tiny-1.0", today=TODAY)
    with edited(file) as entries:
        del entries["acme/tiny-1.0"]
    assert "acme/tiny-1.0" not in models.ids()

    def break_off() -> None:
        with edited(file) as entries:
            entries["half"] = {"id": "half"}
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert "half" not in models.ids()


def test_a_file_that_many_ask_for_is_read_once(tmp_path: Path) -> None:
    """A pipe can be read once: a second reader would wait for ever."""
    pipe = tmp_path / "weights"
    os.mkfifo(pipe)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(file_sha256(pipe)), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    with pipe.open("wb") as out:  # opens as soon as there is a reader
        time.sleep(0.5)  # for the others to ask as well
        out.write(b"weights")
    for thread in threads:
        thread.join(20)
    assert found == [hashlib.sha256(b"weights").hexdigest()] * 3


def test_a_known_model_is_refused_as_not_pinned_until_an_operator_adds_it(tmp_path: Path) -> None:
    catalogue = Catalogue({})
    with pytest.raises(NotFound, match="ft admin models add microsoft/phi-4 --revision COMMIT") as refused:
        catalogue.check_submittable("microsoft/phi-4", today=dt.date(2026, 11, 27))
    assert refused.value.code == "model_not_pinned"
    added = Catalogue({"microsoft/phi-4": ({"id": "microsoft/phi-4", "path": "base"}, build_tiny_model(tmp_path / "base").parent)})
    assert added.check_submittable("microsoft/phi-4", today=dt.date(2026, 11, 27)).directory == tmp_path / "base"


def test_every_value_of_a_known_model_says_where_it_was_read_and_none_is_a_pin() -> None:
    known = base_models.known_models()
    assert len(known) >= 20
    for name, entry in known.items():
        assert set(entry) == {"id", "license", "context_length", "num_parameters", "recipe", "read"}, name
        assert set(entry["read"]) == {"id", "license", "context_length", "num_parameters"} and all(
            map(str.strip, entry["read"].values())
        ), name
        assert recipes.select_recipe(name, adapter="lora", num_parameters=entry["num_parameters"]).name == entry["recipe"], name


@pytest.mark.parametrize("name", ["Qwen3-8B", "Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.3"])
def test_known_parameters_are_those_of_the_shape(name: str) -> None:
    known = {entry["id"].partition("/")[2]: entry["num_parameters"] for entry in base_models.known_models().values()}
    shape = model_shapes.well_known_shape(name)
    assert shape is not None and known[name] == shape.num_parameters
