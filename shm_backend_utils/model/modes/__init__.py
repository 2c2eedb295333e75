"""The ways of ``execute`` beside answering one request after another: batches and streams."""
