"""Where the published package has its scaler; it lives in `roundpipe.step.scaler`."""

from roundpipe.step.scaler import GradScaler as GradScaler
