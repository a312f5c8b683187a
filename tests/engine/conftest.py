"""The real model, loaded once for all tests of the engine."""

from __future__ import annotations

import pytest

from kvstored_client.engine.checkpoint import Checkpoint, bundled_smollm2, load_gguf
from kvstored_client.engine.model import Model
from kvstored_client.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return load_gguf(bundled_smollm2())


@pytest.fixture(scope="session")
def model(checkpoint: Checkpoint) -> Model:
    return Model(checkpoint)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer(checkpoint.tokenizer)
