"""What turns a prepared prompt into tokens: an engine session or an echo for tests."""
