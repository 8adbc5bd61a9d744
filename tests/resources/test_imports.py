"""What processes that stay import: what they do not need costs each of them tens of megabytes for as long as the stack runs."""

import subprocess
import sys

import pytest

FOR_DATA = {"numpy", "pyarrow", "tokenizers", "torch", "transformers", "mlflow"}


@pytest.mark.parametrize("module", ["sensors.daemon", "deploy.local.dagster_web.__main__"])
def test_a_process_that_reads_no_training_data_imports_no_library_for_it(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({FOR_DATA!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
