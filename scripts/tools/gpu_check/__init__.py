"""Check and measure this library on a real GPU."""
