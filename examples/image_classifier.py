"""Trains a ResNet from scratch on small pictures, in fp16 with fp32 masters and a loss scale.

    python examples/image_classifier.py
    ROUNDPIPE_DEVICES=virtual:4 python examples/image_classifier.py --epochs 4

The program makes its own pictures: noisy stripes in one of eight directions, 3 x 32 x 32 like CIFAR's. To train on a
data set of files, let `pictures` return it. The model is an `nn.Sequential`, so each of its children is a layer of the
pipeline.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from roundpipe import GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.optim import AdamW

CLASSES = 8
MICROBATCHES = 4


class Block(nn.Module):
    """Two convolutions beside a shortcut: He et al., "Deep Residual Learning for Image Recognition" (2015)."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Identity() if (inside, stride) == (outside, 1) else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(pictures) + self.shortcut(pictures))


def resnet(widths: tuple[int, ...] = (8, 16, 32)) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for inside, outside in zip((widths[0], *widths), widths, strict=False):
        layers += [Block(inside, outside, 1 if inside == outside else 2), Block(outside, outside)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def pictures(count: int, seed: int) -> TensorDataset:
    """Stripes in direction `label`, at a random place: `[count, 3, 32, 32]` in fp16, and `[count]` labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angles, places = labels * math.pi / CLASSES, torch.rand(count, generator=generator) * 2 * math.pi
    x, y = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="xy")
    across = x * angles.cos()[:, None, None] + y * angles.sin()[:, None, None]
    stripes = torch.sin(across * 0.7 + places[:, None, None])[:, None].expand(-1, 3, -1, -1)
    noise = torch.randn(stripes.shape, generator=generator) * 0.5
    return TensorDataset((stripes + noise).half(), labels)


def evaluate(model: RoundPipe, loader: DataLoader) -> tuple[float, float]:
    """The mean loss, and the share of the pictures that are recognised."""
    model.synchronize()  # waits for steps that still run
    model.eval()
    loss, right, total = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = model(images).float()
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            right += int((outputs.argmax(1) == labels).sum())
            total += len(labels)
    model.train()
    return loss / total, right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=1000, help="how many to train on (default: %(default)s)")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    train = DataLoader(pictures(arguments.pictures, seed=1), batch_size=32, shuffle=True)
    test = DataLoader(pictures(200, seed=2), batch_size=64)

    options = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    model = RoundPipe(resnet().half(), optim_dtype=torch.float32, model_run_config=options)
    with OptimizerCtx():
        optimizer = AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler()

    def update() -> None:
        scaler.step(optimizer)
        optimizer.zero_grad()

    for epoch in range(1, arguments.epochs + 1):
        seen, loss_sum = 0, 0.0
        for images, labels in train:

            def loss_of(outputs: torch.Tensor, labels: torch.Tensor, count: int = len(images)) -> torch.Tensor:
                # Divided by the whole batch's size, since the microbatches' losses are added.
                loss = nn.functional.cross_entropy(outputs.float(), labels, reduction="sum") / count
                return scaler.scale(loss)

            scale = scaler.get_scale()
            loss = model.forward_backward((images,), label=labels, loss_fn=loss_of)
            model.step(update)
            scaler.update()
            loss_sum += loss.item() / scale * len(images)
            seen += len(images)
        test_loss, accuracy = evaluate(model, test)
        print(f"epoch {epoch}  loss {loss_sum / seen:.3f}  test loss {test_loss:.3f}  test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
