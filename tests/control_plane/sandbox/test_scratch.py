"""Directories for work in progress: their owner's while it lives, a leftover once it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from control_plane.sandbox import scratch
from tests.support.platform.deletable_tenants import killed_while_working, working

ACME, OTHER = "tn-acme", "tn-other"


def test_a_directory_is_under_its_tenant_and_goes_with_its_work(tmp_path: Path) -> None:
    with scratch.directory(tmp_path, ACME) as path:
        (path / "upload").write_text("x")
        assert path.parent == tmp_path / "scratch" / ACME
        assert scratch.is_in_use(tmp_path, ACME) and not scratch.is_in_use(tmp_path, OTHER)
        assert scratch.leftovers(tmp_path, ACME) == [] == scratch.remove_leftovers(tmp_path)
        assert (path / "upload").exists()
    assert not path.exists() and not scratch.is_in_use(tmp_path, ACME)


def test_what_a_killed_process_left_is_found_and_removed_and_what_a_living_one_uses_is_kept(tmp_path: Path) -> None:
    with working(tmp_path, ACME) as kept:
        left = [killed_while_working(tmp_path, tenant) for tenant in (ACME, OTHER)]
        assert all((path / "upload").exists() for path in left)
        assert scratch.leftovers(tmp_path, ACME) == left[:1] and scratch.leftovers(tmp_path, OTHER) == left[1:]
        assert scratch.is_in_use(tmp_path, ACME) and not scratch.is_in_use(tmp_path, OTHER)
        assert sorted(scratch.remove_leftovers(tmp_path)) == sorted(left)
        assert not any(path.exists() for path in left) and (kept / "upload").exists()
        assert scratch.remove_leftovers(tmp_path) == []


def test_the_operators_directories_are_no_tenants(tmp_path: Path) -> None:
    with scratch.directory(tmp_path, None) as path:
        assert path.parent.name == scratch.OPERATOR and not scratch.is_in_use(tmp_path, ACME)
    left = killed_while_working(tmp_path, None)
    assert scratch.leftovers(tmp_path, None) == [left] == scratch.remove_leftovers(tmp_path)


def test_one_whose_process_was_killed_before_it_locked_it_is_a_leftover(tmp_path: Path) -> None:
    left = tmp_path / "scratch" / ACME / "tmpabc"
    left.mkdir(parents=True)
    assert scratch.leftovers(tmp_path, ACME) == [left]


def test_directories_made_while_leftovers_are_removed_are_kept(tmp_path: Path) -> None:
    """A process creates directories as fast as it can; another removes leftovers meanwhile."""
    made = "import sys, pathlib\nfrom control_plane.sandbox import scratch\n"
    made += (
        "for _ in range(300):\n    with scratch.directory(pathlib.Path(sys.argv[1]), 'tn-acme') as path:\n        (path / 'a').touch()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", made, str(tmp_path)])
    while process.poll() is None:
        scratch.remove_leftovers(tmp_path)
    assert process.returncode == 0, "a directory was removed under it"
