"""POST /v1/update_weights: other weights of the same shapes, under a new epoch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstored_client.engine.server.errors import BadRequest, Conflict, Forbidden
from kvstored_client.engine.server.fields import Fields
from kvstored_client.engine.server.runner import EngineRunner
from kvstored_client.engine.types import StepModel

LoadModel = Callable[[Path | None], StepModel]
"""Loads the weights at a path, or once more those the server was started with. On a worker."""

MAX_EPOCH = (1 << 63) - 1


@dataclass(slots=True)
class WeightUpdater:
    """Gives the engine other weights, one update at a time. For the event loop.

    `load` None: it is not allowed.
    """

    runner: EngineRunner
    load: LoadModel | None
    weights_epoch: int = 0
    under_way: bool = False

    async def update(self, fields: Fields) -> int:
        """Load and put in place what a body asks for. Returns the new epoch. Raises ApiError."""
        load = self.load
        if load is None:
            raise Forbidden("start the server with --allow-weight-updates to allow this")
        path = fields.text("path")
        epoch = self._epoch(fields.integer("weights_epoch"))
        fields.close()
        if self.under_way:
            raise Conflict("other weights are being loaded; wait until they are in place")
        self.under_way = True
        try:
            # ValueError: the engine refuses other shapes; loading says what it cannot read.
            model = await asyncio.to_thread(load, Path(path) if path else None)
            engine = self.runner.engine
            placed = self.runner.call(lambda: engine.update_weights(model, epoch))
            await asyncio.wrap_future(placed)
        except (ValueError, OSError) as error:
            raise BadRequest(f"these weights cannot be used: {error}", "path") from error
        finally:
            self.under_way = False
        self.weights_epoch = epoch
        return epoch

    def _epoch(self, wanted: int | None) -> int:
        """The epoch asked for, which must be a later one.

        Where none is asked for it is the time, not the next number: a server that is started again
        begins at the same epoch, and must not take up where other weights once were.
        """
        if wanted is None:
            return max(self.weights_epoch + 1, time.time_ns() // 1_000_000)
        if not self.weights_epoch < wanted <= MAX_EPOCH:
            raise BadRequest(
                f"weights_epoch must be above {self.weights_epoch}, the present one; leave it out "
                "for one that nobody has used",
                "weights_epoch",
            )
        return wanted
