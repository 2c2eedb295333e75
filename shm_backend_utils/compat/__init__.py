"""Call-compatible replacements of other libraries, on this library's memory."""
