"""The published package's path to its scaler; see `roundpipe.model.step.scaler`."""

from roundpipe.model.step.scaler import GradScaler as GradScaler
