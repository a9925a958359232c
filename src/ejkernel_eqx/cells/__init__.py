from .recurrent import Recurrent as Recurrent
