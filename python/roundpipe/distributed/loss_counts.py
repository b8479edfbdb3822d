"""The weight of each node's gradients in a step.

A loss of the user is averaged over the nodes, as DistributedDataParallel does. A model's own loss is the mean over the
labels of all nodes: before each call, the nodes tell each other how many labels they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch

from roundpipe import _core
from roundpipe.distributed.description import of_options
from roundpipe.distributed.differences import held, ranks_in_words
from roundpipe.distributed.nodes import Nodes, digest_of

_CALLS, _STEPS, _FAILED = "calls", "steps", "had an error in a call of"


class LossCounts:
    """What the calls since the last step have used as their losses, on this node and on the others.

    A node that makes fewer calls than another, or none, answers the other's questions while it steps.

    Attributes:
        users: in `used`, the losses are the user's.
        mean: they are the model's own, means over the labels of a call.
        parts: they are the model's own, divided by the `num_items_in_batch` of the call.
    """

    users: ClassVar[str] = "a loss of the user"
    mean: ClassVar[str] = "the model's own loss"
    parts: ClassVar[str] = "the model's own loss with num_items_in_batch"

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._start_over()

    def _start_over(self) -> None:
        self.used: str | None = None
        self._items: float = 0  # this node's num_items_in_batch
        self._labels = 0  # that its calls have counted
        self._failed: str | None = None

    def note_users_loss(self) -> None:
        """Notes a call whose loss is the user's.

        Raises:
            ValueError: an earlier call since the last step used the model's own.
        """
        self._use(self.users)

    def note_backward_of(self, outputs: Iterable[torch.Tensor]) -> None:
        """Notes, when a loss of these outputs goes backward, that it is the user's; that raises what `note_users_loss`
        does."""
        for node in {output.grad_fn for output in outputs}:
            if node is not None:
                node.register_prehook(lambda gradients: self.note_users_loss())

    def note_sum(self) -> None:
        """Notes a call whose loss is the model's own, a sum that is divided by nothing.

        Raises:
            ValueError: an earlier call since the last step used another loss.
        """
        self._use(self.mean)

    def state(self) -> dict[str, Any]:
        """What the calls since the last step have used, for a checkpoint."""
        return {"used": self.used, "items": self._items, "labels": self._labels}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Takes what `state` has returned; None: there were no calls since the last step."""
        self._start_over()
        if state is not None:
            self.used, self._items, self._labels = state["used"], state["items"], state["labels"]

    def forget(self) -> None:
        """Forgets the calls since the last step, whose gradients were dropped; not that one has failed."""
        failed = self._failed
        self._start_over()
        self._failed = failed

    def note_failure(self, error: BaseException) -> None:
        """Notes that a call has failed after its labels were counted in the other nodes' losses."""
        self._failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    @contextmanager
    def telling_failure(self) -> Iterator[None]:
        """Tells the other nodes, which make a step, of an error in the block: they then make none either. Collective
        if there is one."""
        try:
            yield
        except Exception as error:
            self.note_failure(error)
            with suppress(_core.RoundPipeError, ValueError):
                self._ask(_STEPS, {})
            raise

    def total(self, labels: int, items: float | None) -> float:
        """What this call's loss is to be divided by, instead of this node's own number. Collective.

        Args:
            labels: how many of this node's labels count.
            items: the call's `num_items_in_batch`.

        Returns:
            The number of labels on all nodes; with `items`, the sum of these.

        Raises:
            ValueError: the nodes use losses of several kinds.
            RoundPipeError: a call has failed on another node.
        """
        self._use(self.mean if items is None else self.parts)
        self._labels += labels
        self._items = 0 if items is None else items
        told = self._ask(_CALLS, {"labels": labels})
        return float(sum(each["labels" if items is None else "items"] for each in told))

    def step(self, options: Mapping[str, str], groups: list[dict[str, Any]]) -> float:
        """Ends the step's calls, and returns the factor of its gradients' sum. Collective.

        Args:
            options: of the step, by name.
            groups: the optimizer's groups, whose hyperparameters have to be alike.

        Raises:
            ValueError: the nodes differ in what they step with, or use losses of several kinds.
            RoundPipeError: a call has failed on a node.
        """
        told = dict(options)
        for index, group in enumerate(groups):
            told |= of_options(f" of group {index}", group)
        try:
            while True:
                answers = self._ask(_STEPS, {"labels": 0, "counted": self._labels, "digest": digest_of(told)})
                if all(each["kind"] == _STEPS for each in answers):
                    break
            digests = [each["digest"] for each in answers]
            self._nodes.compare(digests, _STEPS, told, "the same step on every rank")
            self._refuse_counted_twice(answers)
            used = next((each["used"] for each in answers if each["used"] is not None), None)
        finally:
            self._start_over()
        return 1 / self._nodes.size if used in (None, self.users) else 1.0

    def _use(self, what: str) -> None:
        if self.used not in (None, what):
            raise ValueError(
                f"[distributed] this call uses {what} and an earlier one since the last step {self.used}, expected one "
                "kind: gradients of a user's loss are averaged over the nodes, those of the model's own are added"
            )
        self.used = what

    def _ask(self, kind: str, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What all nodes tell; they make calls, or a step."""
        mine = _FAILED if self._failed is not None else kind
        message = {**told, "used": self.used, "items": self._items, "error": self._failed}
        answers = self._nodes.gather(mine, message, beside=(_CALLS, _STEPS, _FAILED))
        failed = [rank for rank, each in enumerate(answers) if each["kind"] == _FAILED]
        if failed:
            self._start_over()
            raise _core.RoundPipeError(
                f"[distributed] a call of {self._nodes.model} failed on {ranks_in_words(failed)} "
                f"({answers[failed[0]]['error']}), so the gradients of this step do not belong together; expected all "
                "nodes to drop them: optimizer.zero_grad(), and repeat the step's calls"
            )
        kinds = [each["used"] for each in answers]
        if len({used for used in kinds if used is not None}) > 1:
            self._start_over()
            raise ValueError(
                f"[distributed] the ranks use losses of several kinds in one step: {held(map(str, kinds))}; expected "
                "one kind, as a user's loss is averaged over the nodes and the model's own is added"
            )
        return answers

    def _refuse_counted_twice(self, answers: list[dict[str, Any]]) -> None:
        """Raises ValueError if every node's `num_items_in_batch` was the number of all nodes already."""
        counted = [each["counted"] for each in answers]
        items = [each["items"] for each in answers if each["used"] == self.parts]
        if items and sum(counted) and all(given == sum(counted) for given in items) and max(counted) < sum(counted):
            raise ValueError(
                f"[distributed] num_items_in_batch was {items[0]:g} on every rank, which is how many labels they have "
                "together, expected each rank's own number: RoundPipe adds them; drop this step's gradients with "
                "optimizer.zero_grad()"
            )


class CallCount:
    """Counts one call's labels, once, however often the call is cut anew.

    Attributes:
        counted: whether the other nodes have been told.
        loss_factor: makes this node's own loss of its part of the loss of all nodes.
        share: this node's part of what the loss of all nodes counts.
    """

    def __init__(self, counts: LossCounts) -> None:
        self._counts = counts
        self._total: float | None = None
        self.counted = False
        self.loss_factor = 1.0
        self.share = 1.0

    def total(self, labels: int, items: float | None) -> float:
        """See `LossCounts.total`."""
        if self._total is None:
            self._total = self._counts.total(labels, items)
            self.counted = True
            own = labels if items is None else items
            self.loss_factor = self._total / own if own else 1.0
            self.share = own / self._total if self._total else 1.0
        return self._total

    def note_users_loss(self) -> None:
        """See `LossCounts.note_users_loss`."""
        self._counts.note_users_loss()

    def note_sum(self) -> None:
        """See `LossCounts.note_sum`."""
        self._counts.note_sum()

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Notes an error in the block for the other nodes, if they have been told of the call."""
        try:
            yield
        except BaseException as error:
            if self.counted:
                self._counts.note_failure(error)
            raise
