"""Parts that commands share with tools of a checkout: servers, models, command lines and rounds."""
