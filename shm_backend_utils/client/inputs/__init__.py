"""What users pass as inputs, made ready to be written where it belongs, in one copy."""
