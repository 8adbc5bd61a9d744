"""``ft wandb``: the tenant's key for Weights & Biases."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from getpass import getpass
from typing import TYPE_CHECKING, Any

import typer

from ft_client.cli.output import ago, fields
from ft_client.cli.record_views import add_group
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient


def register(app: typer.Typer) -> None:
    add_group(app, "wandb", {"set": set_key, "show": show, "remove": remove}, help="Your key for Weights & Biases.", panel="Account")


def _show(found: Mapping[str, Any]) -> None:
    fields({"key": found["hint"], "stored": ago(found["created_at"]), "replaced": ago(found["updated_at"])})


@remote(_show)
def set_key(client: FtClient) -> Any:
    """Store your W&B API key: WANDB_API_KEY, else read from the terminal or standard input. Jobs with --wandb-project use it."""
    key = os.environ.get("WANDB_API_KEY") or (getpass("W&B API key: ") if sys.stdin.isatty() else sys.stdin.readline())
    return client.wandb.set(api_key=key.strip())


@remote(_show)
def show(client: FtClient) -> Any:
    """Show when a key was stored, and its last characters."""
    return client.wandb.retrieve()


@remote("the key is deleted")
def remove(client: FtClient) -> Any:
    """Delete your key; jobs that are running stop sending."""
    return client.wandb.remove()
