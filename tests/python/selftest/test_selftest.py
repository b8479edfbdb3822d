"""The command finds the device that gives wrong bits, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import roundpipe
from roundpipe.cli import app
from roundpipe.selftest import compute, links, training
from roundpipe.selftest.checksum import copies, crc32c, majority, weighted_sums
from roundpipe.selftest.compute import check_compute
from roundpipe.selftest.finding import TOGETHER, Finding, minority, verdict
from roundpipe.selftest.links import check_links
from roundpipe.selftest.training import TrainingCheck

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["selftest", "--rounds", "1", "--size", "500KB", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def run_json(devices: str) -> tuple[int, dict[str, Any]]:
    code, text = run("--devices", devices, "--json")
    return code, json.loads(text)


def test_healthy_devices_pass() -> None:
    code, said = run("--devices", "virtual:2,debug,chunk=100KB")
    *lines, last = said.splitlines()
    assert code == 0, said
    assert last == f"whole: 2 devices, {len(lines)} checks"
    assert {line.split()[0] for line in lines} == {"virtual:0", "virtual:1", "cpu", TOGETHER}
    for what in (
        "values up",
        "gradients down",
        "cross entropy bfloat16",
        "chain bfloat16 asynchronous",
        "llama float32",
    ):
        assert what in said


def test_a_device_with_wrong_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "model_names", lambda: ["chain"])
    # From its 30th microbatch on: the links were right.
    code, found = run_json("virtual:4,fail=2:bits@30")
    assert code == 1
    assert list(found["wrong"]) == ["virtual:2"]
    assert set(found["wrong"]["virtual:2"]) == {"training", "training together"}
    assert not found["whole"] and not found["unclear"]
    for check in found["checks"]:
        assert check["ok"] == (check["device"] not in ("virtual:2", TOGETHER) or check["check"] != "training"), check


@pytest.mark.long
def test_two_wrong_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "model_names", lambda: ["chain"])
    code, said = run("--devices", "virtual:3,fail=0:bits@1,fail=2:bits@1")
    assert code == 1
    wrong = [line for line in said.splitlines() if line.startswith("wrong")]
    assert wrong == [
        f"wrong: virtual:{device} (2 of links, 4 of training, 4 of training together)" for device in (0, 2)
    ]


def test_a_device_that_is_wrong_only_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    check = TrainingCheck(roundpipe.devices("virtual:3"), 1)

    def train(devices: Any, case: Any) -> dict[str, int]:
        return {"loss": int(len(devices) > 1 and 1 in devices)}

    monkeypatch.setattr(check, "_train", train)
    monkeypatch.setattr(check, "_expected", lambda on, case: {"loss": 0})
    assert all(finding.ok for device in range(3) for finding in check.alone(device))
    together = check.together()
    assert {(finding.ok, finding.suspects) for finding in together} == {(False, ("virtual:1",))}


def test_a_device_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "model_names", lambda: ["chain"])
    code, found = run_json("virtual:2,fail=1:error@3")
    assert code == 1
    assert found["wrong"] == {"virtual:1": {"links": ["stopped"], "training": ["not run"]}}
    assert "every queue returns an error" in next(c["detail"] for c in found["checks"] if not c["ok"])


# --- links ---


@pytest.mark.parametrize("at", [1, 2])
def test_wrong_bits_on_the_way_down(at: int) -> None:
    pool = roundpipe.devices(f"virtual:2,fail=1:bits@{at}")
    assert all(finding.ok for finding in check_links(pool, 0, 100_000, 1))
    found = {finding.what: finding.ok for finding in check_links(pool, 1, 100_000, 1)}
    # The second microbatch is the one of the weights.
    assert found == {"values up": True, "values down": at == 2, "weights up": True, "gradients down": False}


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    content = tensor.detach().clone()
    content.view(torch.uint8)[-1] ^= 64
    return content


class WrongEcho(nn.Module):
    """A device that has got other bits than were sent: it sees them, and sends them back."""

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        got = [flipped(value) if value.numel() > 1000 else value.clone() for value in values]
        return (*got, *(copies(weighted_sums(value)) for value in got))


def test_wrong_bits_on_the_way_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_Echo", WrongEcho)
    found = {finding.what: finding for finding in check_links(roundpipe.devices("virtual:1"), 0, 100_000, 1)}
    assert [what for what, finding in found.items() if not finding.ok] == ["values up"]
    assert "arrived with other bits, the first: uint8 of 4099 bytes" in found["values up"].detail


def test_checksums() -> None:
    bits = torch.randint(0, 256, (200_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sums = weighted_sums(bits)
    assert sums.shape == (4,)
    for place in (0, 65_535, 65_536, 200_000):
        other = bits.clone()
        other[place] ^= 1
        assert (weighted_sums(other) != sums).nonzero().flatten().tolist() == [place // 65_536]
    swapped = bits.clone()
    swapped[:2] = bits[:2].flip(0)
    assert not torch.equal(weighted_sums(swapped), sums)
    assert crc32c([bits]) == crc32c(bits.split(70_000)) != crc32c([swapped])
    received = copies(sums)
    received[0, 0] ^= 1
    assert torch.equal(majority(received), sums)


# --- compute ---


def test_each_device_against_itself_its_kind_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device("cpu", number) for number in range(4)]
    made = dict.fromkeys(devices, 0)

    def result(layer: Any, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        values = torch.arange(1.0, 9.0)
        if device in made:
            made[device] += 1
        if device.index == 1 and made[device] == 5:  # once
            values[3] += 1e-6
        if device.index == 2:  # always, by little
            values[4] += 1e-6
        if device.index == 3:  # by much
            values[5] = float("nan")
        return [values]

    monkeypatch.setattr(compute, "_run", result)
    found = verdict(check_compute(devices, rounds=7))
    assert not found.unclear
    assert found.wrong["cpu:1"] == {"compute": ["matmul float32"]}
    assert found.wrong["cpu:2"]["compute"][0] == "matmul float32, alike"
    assert found.wrong["cpu:3"]["compute"][:2] == ["matmul float32, alike", "matmul float32, near the host"]
    assert set(found.wrong) == {"cpu:1", "cpu:2", "cpu:3"}


def test_a_device_that_returns_an_error_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    host, lost = torch.device("cpu"), torch.device("cpu", 1)
    run_layer = compute._run

    def result(layer: Any, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        if device == lost and layer is compute._norm:
            raise RuntimeError("an illegal memory access\nand more")
        return run_layer(layer, device, dtype)

    monkeypatch.setattr(compute, "_run", result)
    findings = list(check_compute([host, lost], 1))
    assert [f.detail for f in findings if not f.ok] == ["an illegal memory access"]
    assert verdict(findings).wrong == {"cpu:1": {"compute": ["norm float32"]}}
    assert "matmul float32, alike" in [f.what for f in findings if f.device == "cpu:1"]
    assert {f.what for f in findings if f.device == "cpu"} > {"norm float32", "cross entropy bfloat16"}


def test_who_is_wrong() -> None:
    assert minority([7, 7, 7]) == ()
    assert minority([7, 8, 7]) == (1,)
    assert minority([7, 8]) == (0, 1)

    def failed(*suspects: str) -> Finding:
        return Finding("a", "compute", "matmul", False, "", suspects)

    both = failed("a", "b")
    assert verdict([both]).unclear == [both]
    assert not verdict([both]).is_whole
    assert verdict([both, failed("b")]).wrong == {"b": {"compute": ["matmul", "matmul"]}}
    assert verdict([both, failed("b")]).unclear == []
    assert verdict([]).is_whole


def test_bad_options() -> None:
    for option, value in (("--rounds", "0"), ("--size", "10KB")):
        with pytest.raises(ValueError, match=f"{option} is {value}"):
            CliRunner().invoke(app, ["selftest", option, value], catch_exceptions=False)
