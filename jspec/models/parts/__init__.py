"""What the layers of models are made of: declarations and weights, rotation, products, pages of keys and values."""
