"""What ``execute`` may do beside answering one request after another: batches and streams."""
