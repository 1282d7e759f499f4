"""From what a caller gives to a request and to arrays of the device."""
