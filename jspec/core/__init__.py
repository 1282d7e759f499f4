"""Records, draft trees and engine options that the other packages of jspec share."""
