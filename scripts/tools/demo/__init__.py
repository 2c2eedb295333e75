"""Send photographs through a model on every path, compare and measure."""
