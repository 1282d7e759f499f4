"""The version of jspec."""

VERSION = "0.1.0"
