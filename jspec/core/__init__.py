"""Records, draft trees and options that all other packages share."""
