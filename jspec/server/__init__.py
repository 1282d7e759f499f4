"""Serves an engine over HTTP with the routes of OpenAI's API (`jspec serve`); needs the extra `serve`."""
