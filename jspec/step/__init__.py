"""The programs that are compiled for the device, mainly the decoding step and the prefill of prompts."""
