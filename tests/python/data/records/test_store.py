"""Samples on disk: what is written is read, cut where it should be, and found by its record."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.data.records.store import SampleFiles, of_labels, sample_files
from roundpipe.data.samples import IGNORED

SAMPLES = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=8)


def labels_of(sample: list[tuple[int, bool]]) -> list[int]:
    return [token if counts else IGNORED for token, counts in sample]


@given(sample=SAMPLES, length=st.integers(1, 9))
def test_labels_as_runs(sample: list[tuple[int, bool]], length: int) -> None:
    tokens = [token for token, _ in sample]
    encoded = of_labels(tokens, labels_of(sample))
    assert encoded.counted == sum(counts for _, counts in sample[1:])
    assert encoded.cut(length) == of_labels(tokens[:length], labels_of(sample[:length]))


@settings(max_examples=20)
@given(records=st.lists(st.lists(SAMPLES, max_size=3), min_size=1, max_size=6).filter(lambda records: records[0]))
def test_what_is_written_is_read(records: list[list[list[tuple[int, bool]]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with sample_files(Path(folder), 100, 8) as writer:
            for record in records:
                writer.append([of_labels([token for token, _ in sample], labels_of(sample)) for sample in record])
        files = SampleFiles(Path(folder), pairs=False)
        assert files.records == len(records)
        for number, record in enumerate(records):
            samples = files.samples_of(np.array([number]))
            read = [files.sample(int(sample)) for sample in samples]
            assert [each["labels"].tolist() for each in read] == [labels_of(sample) for sample in record]
            assert [each["input_ids"].tolist() for each in read] == [[token for token, _ in one] for one in record]
            assert files.lengths(samples).tolist() == [len(sample) for sample in record]
        everything = files.samples_of(np.arange(len(records)))
        assert everything.tolist() == list(range(len(files)))
