"""The real ``openai`` client against the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from control_plane.client import FtClient


@pytest.fixture
def client(api_url: str, api_key: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client, as a user of the platform configures it."""
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=api_key) as made:
        yield made


@pytest.fixture
def ft(api_url: str, api_key: str) -> Iterator[FtClient]:
    with FtClient(base_url=api_url, api_key=api_key) as made:
        yield made


@pytest.fixture
def training_file(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> str:
    """Id of an uploaded file that can be trained on."""
    uploaded = client.files.create(file=write_chat_rows(), purpose="fine-tune")
    assert uploaded.status == "processed", uploaded.status_details
    return uploaded.id
