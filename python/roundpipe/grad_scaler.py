"""The published package's path to its scaler; see `roundpipe.step.scaler`."""

from roundpipe.step.scaler import GradScaler as GradScaler
