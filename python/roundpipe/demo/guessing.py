"""The results of guessing without a model: its loss and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundpipe.demo.training import IGNORED, Batch


@dataclass(frozen=True)
class Guessing:
    """Losses in nats per token, accuracies as shares of the held-out tokens.

    Attributes:
        uniform_loss: loss of equal probabilities for all tokens: ln(vocabulary).
        uniform_accuracy: 1 / vocabulary.
        frequency_loss: loss of each token's frequency in the training text, regardless of context.
        most_frequent_accuracy: accuracy of always guessing the training text's most frequent token.
    """

    uniform_loss: float
    uniform_accuracy: float
    frequency_loss: float
    most_frequent_accuracy: float


def guess(training_text: Tensor, held_out: Sequence[Batch], vocabulary: int) -> Guessing:
    """Guesses the labels of `held_out` from the counts of tokens in `training_text` [tokens].

    Each count is increased by one, so that tokens that were never seen have a probability.
    """
    labels = torch.cat([batch.labels.flatten() for batch in held_out])
    labels = labels[labels != IGNORED]
    counts = torch.bincount(training_text, minlength=vocabulary)
    log_probabilities = (counts + 1).double().log() - math.log(len(training_text) + vocabulary)
    return Guessing(
        uniform_loss=math.log(vocabulary),
        uniform_accuracy=1 / vocabulary,
        frequency_loss=-float(log_probabilities[labels].mean()),
        most_frequent_accuracy=float((labels == counts.argmax()).double().mean()),
    )
