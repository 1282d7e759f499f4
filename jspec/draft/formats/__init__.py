"""The files of heads, by exporter: from which keys and tensors each head is made."""
