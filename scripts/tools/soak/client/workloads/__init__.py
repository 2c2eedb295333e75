"""What a client process of the soak does, each with whichever of its clients it is given."""
