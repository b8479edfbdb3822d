"""What a model's steps take: predicted beside measured, and what limits them."""
