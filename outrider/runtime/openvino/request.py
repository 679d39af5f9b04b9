"""A compiled OpenVINO graph that is ready to run, and the arrays it reads: handing it new ones costs a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


class Request:
    def __init__(self, graph: Any, settings: Mapping[str, Any]) -> None:
        """Compiles, which takes seconds; `graph` is an `openvino.Model`."""
        import openvino as ov

        self._compiled = ov.Core().compile_model(graph, "CPU", dict(settings))
        # by number: a name is looked for among all inputs and outputs, a hundred of them
        self._outputs = {name: i for i, out in enumerate(self._compiled.outputs) for name in out.get_names()}
        self._begin()

    def release(self) -> None:
        """Changes state: lets go of every array."""
        if self._held:
            self._begin()

    def _begin(self) -> None:
        self.native = self._compiled.create_infer_request()
        self._inputs: Arrays = {}
        self._held: Arrays = {}
        self._bound: object = None

    def bind(self, key: object, arrays: Callable[[], Arrays]) -> None:
        """Changes state: the graph reads these arrays where they lie, until another key comes."""
        import openvino as ov

        if self._bound == key:
            return
        fresh = arrays()
        self._held |= fresh  # they must outlive their use
        for name, array in fresh.items():
            self.native.set_tensor(name, ov.Tensor(array, shared_memory=True))
        self._bound = key

    def feed(self, inputs: Arrays) -> None:
        """Changes state: values go into arrays that the request holds."""
        import openvino as ov

        for name, array in inputs.items():
            held = self._inputs.get(name)
            if held is not None and held.shape == array.shape:
                held[...] = array
            else:
                self._inputs[name] = held = array.copy()
                self.native.set_tensor(name, ov.Tensor(held, shared_memory=True))

    def infer(self) -> None:
        self.native.infer()

    def out(self, name: str) -> NDArray[np.float32]:
        """The next inference writes over it."""
        return self.native.get_output_tensor(self._outputs[name]).data


def shaped(graph: Any, hidden: frozenset[int], shapes: Mapping[str, tuple[int, ...]] | None = None) -> Any:
    """A copy with these hidden states as outputs, because others would cost time; and with inputs of fixed shapes."""
    import openvino as ov

    graph, wanted = graph.clone(), {f"hidden.{i}" for i in hidden}
    for result in graph.get_results():
        names = result.get_output_tensor(0).get_names()
        if any(name.startswith("hidden.") for name in names) and not names & wanted:
            graph.remove_result(result)
    if shapes is not None:
        graph.reshape({name: ov.PartialShape(list(shape)) for name, shape in shapes.items()})
    return graph
