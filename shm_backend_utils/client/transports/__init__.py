"""gRPC and HTTP, for threads and for asyncio, behind one interface."""
