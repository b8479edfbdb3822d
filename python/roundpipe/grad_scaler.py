"""Where the published package has its scaler; it lives in `roundpipe.scaler`."""

from roundpipe.scaler import GradScaler as GradScaler
