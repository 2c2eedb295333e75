"""gRPC and HTTP, blocking and not: messages of one shape, sent and answered."""
