"""What the field has today, call-compatible, on this library's memory."""
