"""The nodes that train one model together."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from roundpipe import _core
from roundpipe.distributed.groups import (
    backend_for_tensors_on_the_host,
    chosen_group,
    control_beside,
    made_beside,
    timeout_of,
    try_collectives,
)
from roundpipe.distributed.reused import Reused

T = TypeVar("T")


class _Shared:
    """What the models of one process group share. Keeps no reference to it, so that it can end.

    Attributes:
        control: what a rank does with one model is seen by a rank that does something with another.
        pairs: of groups, for gradients and weights.
        controls: for threads of their own.
    """

    def __init__(self, control: _core.Control) -> None:
        self.control = control
        self.pairs: Reused[tuple[Any, Any]] = Reused()
        self.controls: Reused[_core.Control] = Reused()


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()


class Nodes:
    """The nodes that train one model together, each a rank of a process group with devices of its own.

    Made when the model is wrapped. Every rank wraps the same models in the same order. Calling thread only.

    Attributes:
        rank: this node's.
        size: how many there are.
        model: which model it is, in messages.
        agreement: what they agree on about it.
    """

    def __init__(self, shared: _Shared, process_group: Any, model: str) -> None:
        self._shared = shared
        self._process_group = process_group
        self._timeout = timeout_of(process_group)
        self.agreement = _core.Agreement(shared.control, model)
        self.rank, self.size = self.agreement.rank, self.agreement.size
        self.model = self.agreement.model
        self._groups: tuple[Any, Any] | None = None  # for gradients and weights

    @staticmethod
    def of(process_group: Any, model: str) -> Nodes | None:
        """The nodes of a model that is being wrapped; None if it is trained alone.

        Args:
            process_group: see `chosen_group`.
            model: its name.
        """
        group = chosen_group(process_group)
        if group is None:
            return None
        if group not in _shared:
            _shared[group] = _Shared(control_beside(group, timeout_of(group)))
        return Nodes(_shared[group], group, model)

    def gather(self, kind: str, told: Any) -> list[Any]:
        """Returns what every rank has told, in the order of the ranks. Collective; for a few values of JSON.

        Args:
            kind: what this rank is doing, in words after its name, such as "saves".
            told: its message.

        Raises:
            ValueError: another rank is doing something else.
            RoundPipeError: another rank does not answer.
        """
        return [json.loads(each) for each in self.agreement.gather(kind, json.dumps(told).encode())]

    def agree(self, kind: str, told: Mapping[str, str], expected: str) -> None:
        """Refuses to go on if the ranks have not told the same. Collective.

        Args:
            kind: see `gather`.
            told: what this rank has, by name.
            expected: the end of the message, after "expected".

        Raises:
            ValueError: something differs; the message names it, and the ranks.
        """
        self.agreement.agree(kind, list(told.items()), expected)

    def groups(self) -> tuple[Any, Any]:
        """The groups that carry gradients and weights of the model's optimizer. Collective when they are taken.

        Raises:
            ValueError: their backend cannot do what a step does.
            RoundPipeError: another rank did not join in.
        """
        if self._groups is None:
            self._groups = self._taken(self._shared.pairs, self, self._new_pair)
            _core.Nodes.drain_all()  # also what a model that is gone has not waited for
        return self._groups

    def weights_name(self) -> str:
        """The name of the group that carries weights. Collective when it is taken; see `groups`."""
        name: str = self.groups()[1].group_name
        return name

    def control_for(self, user: object, timeout: timedelta) -> _core.Control:
        """A way to exchange messages for a thread of its own, for as long as `user` lives. Collective.

        Args:
            user: weakly referenced.
            timeout: how long a rank may take to answer; always the same.
        """
        return self._taken(self._shared.controls, user, lambda: self._new_control(timeout))

    def _taken(self, reused: Reused[T], user: object, make: Callable[[], tuple[str, T]]) -> T:
        return reused.take(user, self.gather("takes groups for", reused.free()), make)

    def _new_pair(self) -> tuple[str, tuple[Any, Any]]:
        backend = backend_for_tensors_on_the_host(self._process_group)
        gradients, weights = (made_beside(self._process_group, backend, self._timeout) for _ in range(2))
        for group in (gradients, weights):
            try_collectives(group, backend)
        return gradients.group_name, (gradients, weights)

    def _new_control(self, timeout: timedelta) -> tuple[str, _core.Control]:
        control = control_beside(self._process_group, timeout)
        return control.name, control

    def for_optimizer(self) -> _core.Nodes:
        """What an optimizer of the engine needs to know of its groups; an earlier one has finished. Collective."""
        gradients, weights = self.groups()
        return _core.Nodes(
            gradients.group_name, weights.group_name, self._shared.control, self._timeout.total_seconds()
        )
