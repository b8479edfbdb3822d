"""Which pictures, videos and sounds of a batch belong to which of its rows."""
