"""What can be said about a model or a run besides its text: replay, explain, inspect, trace, exactness, comparison."""
