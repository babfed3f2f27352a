"""Django in one file: a view that sends. The producer survives the fork of a server's workers.

DJANGO_SETTINGS_MODULE=examples.django_app django-admin runserver
NameServers: NAMESRV_ADDR, else 127.0.0.1:9876
"""

import json

from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from penstock import Message, Producer

SECRET_KEY = "only an example"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = __name__
USE_TZ = True

producer = Producer(group="signup")


@csrf_exempt
def register(request: HttpRequest, user: int) -> HttpResponse:
    message = Message("UserRegistered", json.dumps({"id": user}), keys=[str(user)])
    return JsonResponse({"message": producer.send(message).message_id})


urlpatterns = [path("users/<int:user>", register)]


def application() -> object:
    """What a WSGI server runs; `with producer` in a script of your own does as well."""
    producer.start()
    return get_wsgi_application()
