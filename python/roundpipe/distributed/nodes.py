"""The nodes that train one model together."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

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

# One for each process group: what a rank does with one model is seen by a rank that does something with another.
_controls: weakref.WeakKeyDictionary[Any, Control] = weakref.WeakKeyDictionary()


class Nodes:
    """The nodes that train one model together, each a rank of a process group with devices of its own.

    Made when the model is wrapped. Every rank wraps the same models in the same order. Calling thread only.

    Attributes:
        rank: this node's.
        size: how many there are.
        model: which model it is, in messages.
    """

    def __init__(self, control: Control, process_group: Any, model: str) -> None:
        self._control = control
        self._process_group = process_group
        self._timeout = timeout_of(process_group)
        self.rank, self.size = control.rank, control.size
        control.models += 1
        self.model = f"model {control.models} ({model})"
        self._groups: list[Any] = []  # for gradients and weights, until an optimizer takes them

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
        control = _controls.get(group)
        if control is None:
            timeout = timeout_of(group)
            control = _controls[group] = Control(made_beside(group, "gloo", timeout), timeout)
        return Nodes(control, group, model)

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

    def groups(self) -> list[Any]:
        """The groups that carry gradients and weights of the next optimizer. Collective when they are made.

        Raises:
            ValueError: their backend cannot do what a step does.
            RoundPipeError: another rank did not join in.
        """
        if not self._groups:
            backend = backend_for_tensors_on_the_host(self._process_group)
            self._groups = [made_beside(self._process_group, backend, self._timeout) for _ in range(2)]
            for group in self._groups:
                try_collectives(group, backend)
        return self._groups

    def new_control(self, timeout: timedelta) -> Control:
        """Another way to exchange messages, for a thread of its own. Collective.

        Args:
            timeout: how long a rank may take to answer.
        """
        return Control(made_beside(self._process_group, "gloo", timeout), timeout)

    def for_optimizer(self) -> _core.Nodes:
        """What an optimizer of the engine needs to know of its groups; the next one gets others. Collective."""
        (gradients, weights), self._groups = self.groups(), []
        return _core.Nodes(gradients.group_name, weights.group_name, timeout_s=self._timeout.total_seconds())


def digest_of(told: Mapping[str, str]) -> str:
    """Short, and the same for the same names and values."""
    return hashlib.sha256(json.dumps(dict(told), sort_keys=True).encode()).hexdigest()[:32]
