"""Records, trees and options that all rooms share."""
