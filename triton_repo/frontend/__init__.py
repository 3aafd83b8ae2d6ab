"""From a request to an engine input, and from generated ids to text."""
