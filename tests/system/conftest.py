"""A tiny random model on disk, for every test that runs a real server."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def _worker_fixtures() -> ModuleType:
    """Load the tiny models of the worker's tests."""
    path = Path(__file__).parents[1] / "worker" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _worker_fixtures().save_tiny(tmp_path_factory.mktemp("tiny"), "llama", 4, 2)
