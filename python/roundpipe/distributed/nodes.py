"""The nodes that train one model together."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from roundpipe import _core
from roundpipe.distributed.control import Control
from roundpipe.distributed.differences import differences, held
from roundpipe.distributed.groups import (
    backend_for_tensors_on_the_host,
    chosen_group,
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

    def __init__(self, control: Control) -> None:
        self.control = control
        self.pairs: Reused[tuple[Any, Any]] = Reused()
        self.controls: Reused[Control] = Reused()


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()


class Nodes:
    """The nodes that train one model together, each a rank of a process group with devices of its own.

    Made when the model is wrapped. Every rank wraps the same models in the same order. Calling thread only.

    Attributes:
        rank: this node's.
        size: how many there are.
        model: which model it is, in messages.
    """

    def __init__(self, shared: _Shared, process_group: Any, model: str) -> None:
        self._shared = shared
        self._control = control = shared.control
        self._process_group = process_group
        self._timeout = timeout_of(process_group)
        self.rank, self.size = control.rank, control.size
        control.models += 1
        self.model = f"model {control.models} ({model})"
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
            _shared[group] = _Shared(Control.beside(group, timeout_of(group)))
        return Nodes(_shared[group], group, model)

    def gather(self, kind: str, told: Mapping[str, Any], beside: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Returns what every rank has told, in the order of the ranks. Collective; for a few values of JSON.

        Args:
            kind: what this rank is doing, in words after its name, such as "wraps".
            told: its message.
            beside: what other ranks may be doing at the same time.

        Returns:
            The messages; "kind" says what the rank is doing.

        Raises:
            ValueError: another rank is doing something else.
            RoundPipeError: another rank does not answer.
        """
        mine = {**told, "kind": kind, "model": self.model}
        messages = [json.loads(each) for each in self._control.exchange(json.dumps(mine).encode())]
        fits = all(each["kind"] in (kind, *beside) and each["model"] == self.model for each in messages)
        if not fits:
            doing = ", ".join(f"rank {rank} {each['kind']} {each['model']}" for rank, each in enumerate(messages))
            raise ValueError(
                f"[distributed] the ranks do not do the same: {doing}; expected each to wrap the same models, make the "
                "same optimizers and make the same steps in the same order"
            )
        return messages

    def agree(self, kind: str, told: Mapping[str, str], expected: str) -> None:
        """Refuses to go on if the ranks have not told the same. Collective.

        Args:
            kind: see `gather`.
            told: what this rank has, by name.
            expected: the end of the message, after "expected".

        Raises:
            ValueError: something differs; the message names it, and the ranks.
        """
        digests = [each["digest"] for each in self.gather(kind, {"digest": digest_of(told)})]
        self.compare(digests, kind, told, expected)

    def compare(self, digests: list[str], kind: str, told: Mapping[str, str], expected: str) -> None:
        """`agree`, after the ranks have gathered their digests. Collective if these differ."""
        if len(set(digests)) > 1:
            all_told = [each["told"] for each in self.gather(kind, {"told": dict(told)})]
            what = differences(all_told) or held(digests)
            raise ValueError(f"[distributed] the ranks differ in {self.model}: {what}; expected {expected}")

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

    def control_for(self, user: object, timeout: timedelta) -> Control:
        """A way to exchange messages for a thread of its own, for as long as `user` lives. Collective.

        Args:
            user: weakly referenced.
            timeout: how long a rank may take to answer; always the same.
        """
        return self._taken(self._shared.controls, user, lambda: self._new_control(timeout))

    def _taken(self, reused: Reused[T], user: object, make: Callable[[], tuple[str, T]]) -> T:
        told = self.gather("takes groups for", {"free": reused.free()})
        return reused.take(user, [each["free"] for each in told], make)

    def _new_pair(self) -> tuple[str, tuple[Any, Any]]:
        backend = backend_for_tensors_on_the_host(self._process_group)
        gradients, weights = (made_beside(self._process_group, backend, self._timeout) for _ in range(2))
        for group in (gradients, weights):
            try_collectives(group, backend)
        return gradients.group_name, (gradients, weights)

    def _new_control(self, timeout: timedelta) -> tuple[str, Control]:
        control = Control.beside(self._process_group, timeout)
        return control.name, control

    def for_optimizer(self) -> _core.Nodes:
        """What an optimizer of the engine needs to know of its groups; an earlier one has finished. Collective."""
        gradients, weights = self.groups()
        return _core.Nodes(gradients.group_name, weights.group_name, timeout_s=self._timeout.total_seconds())


def digest_of(told: Mapping[str, str]) -> str:
    """Short, and the same for the same names and values."""
    return hashlib.sha256(json.dumps(dict(told), sort_keys=True).encode()).hexdigest()[:32]
