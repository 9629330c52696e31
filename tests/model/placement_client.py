"""The product's placement client over the model: a request is one step, a claim may be two."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ecomp.placement.client import Placement
from ecomp.placement.http_client import Answer
from tests.kit.memory_placement import Json, PlacementModel, Refused
from tests.model.acting import Call
from tests.model.world import World


class ModelPlacement(Placement):
    def __init__(self, model: PlacementModel, world: World) -> None:
        self.endpoint, self.name = 'memory', 'placement in memory'
        self._model, self._world = model, world

    def get(self, path: str) -> Json:
        return self._world.call(
            Call('placement', ('GET', path)), lambda: self._translate_refusal(lambda: self._model.get(path))
        )

    def write(self, method: str, path: str, body: Json | None) -> None:
        operation = (method, path, json.dumps(body))
        model = self._model
        if not path.startswith('/allocations'):
            call = Call('placement', operation, writes=True)
            self._world.call(call, lambda: self._translate_refusal(lambda: model.write(method, path, body)))
            return
        assert body is not None, 'a claim is released as it was read, never by DELETE'
        bodies = body if method == 'POST' else {path.rsplit('/', 1)[-1]: body}
        call = Call(
            *('placement', operation, True),
            lambda: self._translate_refusal(lambda: model.begin(bodies)),
            lambda: model.creates_consumer(bodies),
        )
        started = self._world.call(call, lambda: self._translate_refusal(lambda: model.finish(model.begin(bodies))))
        if started is not None:
            second = Call('placement', ('goes on', *operation), writes=True, is_second=True)
            self._world.call(second, lambda: self._translate_refusal(lambda: model.finish(started)))

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _translate_refusal(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Refused as error:
            status, body = error.answer
            raise self._make_error(Answer(status, json.dumps(body).encode(), {}), AssertionError) from None  # type: ignore[arg-type]
