"""Tiny random models on disk, for every test that runs a real server."""

import importlib.util
from collections.abc import Callable
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
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `(kind, query_heads, kv_heads, **config) -> directory` of a model made anew."""
    save = _worker_fixtures().save_tiny
    return lambda *shape, **config: save(tmp_path_factory.mktemp("tiny"), *shape, **config)


@pytest.fixture(scope="session")
def tiny_model_directory(save_tiny: Callable[..., Path]) -> Path:
    return save_tiny("llama", 4, 2)
