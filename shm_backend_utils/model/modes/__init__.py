"""What ``execute`` may do beside answering one request after another: batches, streams, calls of other models."""
